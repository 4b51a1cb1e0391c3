"""verify: law 1 as a command. Any layout trains the same model as a single process.

`record.py` trains a few steps and records everything, `run.py` does so on the ranks of a layout, `compare.py`
says how far apart two records are, and `shrink.py` makes a configuration small.
"""
