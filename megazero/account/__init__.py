"""Accounts of what a training takes: FLOPs, bytes of memory, time, and calls of groups.

`flops.py` states the model's FLOPs, `memory.py` measures a rank's bytes on real and on meta tensors, and
`writers.py` writes numbers over steps. `profiler.py` is what a run knows of the annex `profilers/`.
"""
