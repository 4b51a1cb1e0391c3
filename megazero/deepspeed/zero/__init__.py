"""zero: DeepSpeed's `zero`: models sharded while they are built, and sharded parameters read and written.

Start with `init.py` (`Init`) and `gathered.py` (`GatheredParameters`); `parameter.py` is what a script
sees of a parameter, `partition.py` its slice until an engine takes it over. `fragments.py` (`safe_get_*`),
`leaf_modules.py`, `states.py` (`offload_states`) and `order.py` are about the parameters of an engine;
`tiling.py` is a layer made of small ones, `constructors.py` names that need nothing here.
"""

from megazero.deepspeed.zero.constructors import DeepSpeedTensorOverride
from megazero.deepspeed.zero.gathered import (
    GatheredParameters,
    register_external_parameter,
    unregister_external_parameter,
    unwrap_model_for_generation,
)
from megazero.deepspeed.zero.init import Init
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
