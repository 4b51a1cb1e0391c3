"""The units of a module that knows nothing of ZeRO: the modules whose parameters are gathered together."""

from __future__ import annotations

from torch import nn

from megazero.deepspeed.zero.gathered import external_parameters
from megazero.deepspeed.zero.leaf_modules import z3_leaf_module
from megazero.mpu.param_spec import Cut, InitialValues, ParamSpec
from megazero.zero.unit import Unit, module_units

# Their forward passes the weights of modules inside them to one function, without calling those modules.
_TOGETHER = (nn.MultiheadAttention,)


def user_units(model: nn.Module, tp_size: int) -> list[Unit]:
    """One unit per module that owns parameters or reads those of others, in module order.

    A parameter that Megatron's layers have marked as sliced over tensor-parallel ranks gets a spec that says
    so.
    """
    for name, param in model.named_parameters():
        if getattr(param, "tensor_model_parallel", False) or getattr(param, "model_parallel", False):
            dim = max(0, getattr(param, "partition_dim", 0))
            shape = [size * tp_size if i == dim else size for i, size in enumerate(param.shape)]
            spec = ParamSpec(name, tuple(shape), InitialValues("zeros"), (Cut(dim, "tp"),))
            param.__dict__["spec"] = spec
    own = {id(unit.module): unit for unit in module_units(model)}
    units: list[Unit] = []
    inside: set[int] = set()
    for module in model.modules():
        unit = own.get(id(module))
        params = unit.params if unit else ()
        if isinstance(module, _TOGETHER) or z3_leaf_module(module):
            params = tuple(module.parameters())
            inside |= {id(part) for part in module.modules() if part is not module}
        if id(module) not in inside and (params or external_parameters(module)):
            units.append(Unit(0, module, (*params, *external_parameters(module))))
    return units
