"""verify: law 1 as a command. Any layout trains the same model as a single process.

`record.py` trains a few steps and records everything, `compare.py` says how far apart two records are,
`layouts.py` lists the layouts to run.
"""
