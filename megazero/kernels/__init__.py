"""kernels: build libraries of CUDA kernels, find them, and call them with tensors.

The kernels' sources are csrc/*/cuda.cu. nvcc makes the library that GPUs run. From the same sources, a C++
compiler makes a library that runs on the CPU and checks what each kernel does.
"""
