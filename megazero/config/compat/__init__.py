"""compat: Megatron's flags that are not fields of the tree, either accepted without effect or refused.

`foreign.py` says what a row is; the rows are in the files of `config/tables/`. `left_out.py` is about flags
that a script does not give.
"""

from megazero.config.compat.foreign import FOREIGN_FLAGS, Foreign, Ignored, contradiction, verdict
from megazero.config.compat.left_out import megatron_deepspeed, ungrouped

__all__ = [
    "FOREIGN_FLAGS",
    "Foreign",
    "Ignored",
    "contradiction",
    "megatron_deepspeed",
    "ungrouped",
    "verdict",
]
