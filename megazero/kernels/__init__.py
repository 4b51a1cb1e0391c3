"""Libraries of compiled kernels: building them, finding them, and calling them with tensors.

The kernels' sources are csrc/*/cuda.cu. nvcc makes the library that GPUs run. From the same sources, a C++
compiler makes one that runs on the CPU and watches what each kernel does.
"""
