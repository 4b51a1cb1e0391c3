"""account: count what a training takes: FLOPs, bytes of memory, time, and calls between ranks.

`flops.py` has the formulas of a model's FLOPs, `memory.py` measures a rank's bytes on real and on meta
tensors, and `writers.py` writes numbers over steps. `profiler.py` has the base class of the annex
`profilers/`.
"""
