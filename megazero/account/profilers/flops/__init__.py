"""FLOPs by module: `counter.py` counts, `table.py` prints, `native.py` profiles a step of a run.

`megazero.deepspeed.reports.profiling` shows the first two under DeepSpeed's names, for models of any kind.
"""
