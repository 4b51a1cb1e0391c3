"""`Unit`: parameters that are used together and that stage 3 gathers together."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from megazero.mpu.param_spec import InitialValues, ParamSpec


@dataclass(frozen=True)
class Unit:
    """Parameters and the module whose forward uses them.

    All results that a forward computes from the parameters must leave it through its outputs (tensors in
    tuples, lists, dicts and dataclasses): their gradients announce the unit's backward.

    Attributes:
        chunk: model chunk (virtual pipeline stage on this rank); 0 if there is only one.
        module: the module whose forward needs the parameters.
        params: the parameters; one may be in two units (tied or reused weights).
    """

    chunk: int
    module: nn.Module
    params: tuple[nn.Parameter, ...]


def module_units(module: nn.Module, chunk: int = 0) -> list[Unit]:
    """One unit per module that owns parameters directly, in module order.

    A parameter without a `ParamSpec` gets one that describes a dense parameter of its name and shape.
    """
    units = []
    for prefix, owner in module.named_modules():
        params = dict(owner.named_parameters(recurse=False))
        for name, param in params.items():
            if not hasattr(param, "spec"):
                full_name = f"{prefix}.{name}" if prefix else name
                param.spec = ParamSpec(full_name, tuple(param.shape), InitialValues("zeros"))
        if params:
            units.append(Unit(chunk, owner, tuple(params.values())))
    return units
