"""zero: DeepSpeed's `zero`: models sharded while they are built, and sharded parameters read and written.

Start with `init.py` (`Init`) and `gathered.py` (`GatheredParameters`); `parameter.py` is what a script
sees of a parameter, `partition.py` its slice until an engine takes it over.
"""

from megazero.deepspeed.zero.gathered import (
    GatheredParameters,
    register_external_parameter,
    unregister_external_parameter,
)
from megazero.deepspeed.zero.init import Init
from megazero.deepspeed.zero.parameter import ZeroParamStatus, ZeroParamType

__all__ = [
    "GatheredParameters",
    "Init",
    "ZeroParamStatus",
    "ZeroParamType",
    "register_external_parameter",
    "unregister_external_parameter",
]
