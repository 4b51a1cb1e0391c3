// Whether a kernel's parameters can hold what a launch passes: sizes come as 64-bit integers from Python, and kernels
// keep some of them in 32 bits.
#pragma once

#include <type_traits>

namespace megazero {

template <typename Parameter, typename Argument>
bool holds(const Argument& argument) {
  if constexpr (std::is_integral_v<Parameter> && std::is_integral_v<Argument>) {
    return static_cast<Argument>(static_cast<Parameter>(argument)) == argument;
  } else {
    return true;
  }
}

constexpr int kInvalidValue = 1;  // CUDA's code

}  // namespace megazero
