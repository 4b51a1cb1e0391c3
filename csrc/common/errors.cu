// CUDA's errors in words, and whether the driver can run what this library was built with.
#include <cuda_runtime.h>

#include <cstdint>

extern "C" const char* megazero_cuda_error_text(std::int64_t code) {
  return cudaGetErrorString(static_cast<cudaError_t>(code));
}

// 0, or CUDA's error. Makes no context.
extern "C" int megazero_cuda_driver_error() {
  int driver = 0, runtime = 0;
  const cudaError_t error = cudaDriverGetVersion(&driver);
  if (error != cudaSuccess) return static_cast<int>(error);
  cudaRuntimeGetVersion(&runtime);
  return driver / 1000 < runtime / 1000 ? static_cast<int>(cudaErrorInsufficientDriver) : 0;
}
