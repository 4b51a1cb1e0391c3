"""deepspeed: reads a DeepSpeed JSON into the tree.

`table.py` lists the keys, `row.py` says what a row is, and `rows/` says what happens to each key.
"""

from megazero.config.deepspeed.batch import BatchTriangle, resolve_batch
from megazero.config.deepspeed.beside import conflicts, left_to_json, overruled
from megazero.config.deepspeed.extras import Extras, OptimizerExtras, SchedulerExtras
from megazero.config.deepspeed.read import DeepSpeedSettings, read_deepspeed

__all__ = [
    "BatchTriangle",
    "DeepSpeedSettings",
    "Extras",
    "OptimizerExtras",
    "SchedulerExtras",
    "conflicts",
    "left_to_json",
    "overruled",
    "read_deepspeed",
    "resolve_batch",
]
