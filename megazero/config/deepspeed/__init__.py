"""deepspeed: reads a DeepSpeed JSON into the tree.

`sections/` declares each key once: its type, its default in DeepSpeed, and what it does here. `table.py`
lists them, and `read.py` reads a JSON by them.
"""
