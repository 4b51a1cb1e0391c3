"""verify: law 1 as something to run. Any layout trains the same model as one process.

`record.py` trains a few steps and writes everything down, `compare.py` says how far two records are apart,
`layouts.py` lists what is run, `command.py` is `megazero verify`.
"""
