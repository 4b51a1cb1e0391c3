"""The work and the needs of the CUDA kernels: measured on the CPU, and reported by the compiler for GPUs."""
