"""compat: Megatron's flags that are not fields of the tree, either accepted without effect or refused.

`foreign.py` says what a row is; `accepted.py` and `refused.py` hold the rows.
"""

from megazero.config.compat.foreign import FOREIGN_FLAGS, Foreign, Ignored, contradiction, verdict

__all__ = ["FOREIGN_FLAGS", "Foreign", "Ignored", "contradiction", "verdict"]
