"""deepspeed: reads a DeepSpeed JSON into the tree.

`table.py` lists the keys, `row.py` says what a row is, and `rows/` says what happens to each key.
"""
