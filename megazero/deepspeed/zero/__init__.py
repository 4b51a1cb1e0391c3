"""zero: DeepSpeed's `zero`: models sharded while they are built, and sharded parameters read and written.

Start with `init.py` (`Init`) and `gathered.py` (`GatheredParameters`). `parameter.py` has DeepSpeed's
attributes of a parameter, and `partition.py` its slice until an engine takes it over. `parallel.py`,
`sharding.py`, `order.py`, `leaf_modules.py`, `fragments.py` (`safe_get_*`) and `states.py` (`offload_states`)
work on the parameters of an engine; `tiling.py` is a linear layer made of small ones.
"""

from megazero.deepspeed.zero.gathered import (
    GatheredParameters,
    register_external_parameter,
    unregister_external_parameter,
    unwrap_model_for_generation,
)
from megazero.deepspeed.zero.init import DeepSpeedTensorOverride, Init
from megazero.deepspeed.zero.parameter import ZeroParamStatus, ZeroParamType
from megazero.deepspeed.zero.tiling import TiledLinear, TiledLinearReturnBias

__all__ = [
    "DeepSpeedTensorOverride",
    "GatheredParameters",
    "Init",
    "TiledLinear",
    "TiledLinearReturnBias",
    "ZeroParamStatus",
    "ZeroParamType",
    "register_external_parameter",
    "unregister_external_parameter",
    "unwrap_model_for_generation",
]
