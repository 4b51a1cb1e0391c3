"""Libraries of compiled kernels: building them, finding them, and calling them with tensors.

The kernels' sources are csrc/*/cuda.cu. nvcc makes the library that GPUs run. From the same sources, a C++
compiler makes one that runs on the CPU and watches what each kernel does.
"""

from megazero.kernels.library import DTYPE_CODES, Argument, KernelLibrary
from megazero.kernels.on_cpu import KernelCounts, WatchedLibrary

__all__ = ["DTYPE_CODES", "Argument", "KernelCounts", "KernelLibrary", "WatchedLibrary"]
