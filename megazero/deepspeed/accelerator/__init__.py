"""accelerator: one set of calls for a script that runs on the CPU or on CUDA devices.

`cpu.py` has all of them as the CPU answers them, `cuda.py` those that `torch.cuda` answers, and `choose.py`
says which of the two this process uses.
"""
