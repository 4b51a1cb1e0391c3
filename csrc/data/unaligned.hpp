// Reading elements of a mapped index file.
//
// The arrays of an `.idx` start at byte 34, so they are aligned for no type wider than two bytes. A memcpy of
// constant size is the portable unaligned load; compilers turn it into one instruction.
#pragma once

#include <cstdint>
#include <cstring>

namespace megazero::data {

template <typename T>
class Unaligned {
 public:
  Unaligned(const void* base, std::int64_t size) : base_(static_cast<const char*>(base)), size_(size) {}

  T operator[](std::int64_t index) const {
    T value;
    std::memcpy(&value, base_ + index * static_cast<std::int64_t>(sizeof(T)), sizeof(T));
    return value;
  }

  std::int64_t size() const { return size_; }

 private:
  const char* base_;
  std::int64_t size_;
};

}  // namespace megazero::data
