"""Libraries of compiled kernels: how they are built, found, and called with tensors.

The kernels' sources are csrc/*/cuda.cu. nvcc makes the library that GPUs run; a C++ compiler makes, of the
same sources, one that runs on the CPU and watches what each kernel does.
"""

from megazero.kernels.library import DTYPE_CODES, KernelLibrary
from megazero.kernels.on_cpu import KernelCounts, WatchedLibrary

__all__ = ["DTYPE_CODES", "KernelCounts", "KernelLibrary", "WatchedLibrary"]
