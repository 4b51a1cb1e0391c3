"""verify: law 1 as a command. Any layout trains the same model as a single process.

`shrink.py` and `shrink_model.py` make a configuration small, `record.py` trains a few steps and records the
results, `run.py` does so on the ranks of a layout, and `compare.py` measures how far two records differ.
"""
