"""What the CUDA kernels do and need: measured on the CPU, beside what the compiler for GPUs says of them."""
