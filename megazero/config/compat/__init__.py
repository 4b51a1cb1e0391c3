"""compat: Megatron's flags that are not fields of the tree, either accepted without effect or refused.

`foreign.py` says what a row is; the rows are in the files of `config/tables/`. `left_out.py` is about flags
that a script does not give.
"""
