"""accelerator: one interface to the CPU (`cpu.py`) and to CUDA devices (`cuda.py`), see `choose.py`."""
