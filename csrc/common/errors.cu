// CUDA's errors in words.
#include <cuda_runtime.h>

#include <cstdint>

extern "C" const char* megazero_cuda_error_text(std::int64_t code) {
  return cudaGetErrorString(static_cast<cudaError_t>(code));
}
