"""Moving a script's model into the buckets of a store: groups, devices, types, first values."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Container, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from megazero.deepspeed.zero.gathered import external_parameters
from megazero.deepspeed.zero.leaf_modules import z3_leaf_module
from megazero.deepspeed.zero.parallel import UserParallel
from megazero.deepspeed.zero.partition import Partition, partition_of
from megazero.errors import ConfigError
from megazero.mpu.context import ParallelContext
from megazero.mpu.matrices import Matrices
from megazero.mpu.param_spec import Cut, InitialValues, ParamSpec, spec_of
from megazero.zero.build import build_store
from megazero.zero.policy import ZeroPolicy
from megazero.zero.store.store import Store
from megazero.zero.unit import Unit, module_units

_OF_PARTITIONS = ("zero_home", "__deepcopy__")


def group_numbers(model: nn.Module, groups: Sequence[Mapping[str, Any]]) -> dict[int, int]:
    """The parameter group by ``id`` of the parameter. Parameters in no group are frozen, with one warning.

    Raises:
        ConfigError: a group holds something that is not a parameter of the model.
    """
    numbers = {id(param): number for number, group in enumerate(groups) for param in group["params"]}
    mine = {id(param) for param in model.parameters()}
    strangers = sum(key not in mine for key in numbers)
    if strangers:
        raise ConfigError(
            f"`optimizer` must only hold parameters of `model`, but {strangers} of {len(numbers)} are not; "
            "build it from `model.parameters()`"
        )
    left = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in numbers]
    for name in left:
        model.get_parameter(name).requires_grad_(False)
    if left:
        warnings.warn(
            f"{len(left)} parameters that require gradients are in no parameter group and are frozen: "
            f"{', '.join(left[:5])}{', ...' if len(left) > 5 else ''}",
            stacklevel=2,
        )
    return numbers


def prepare(
    model: nn.Module,
    params: Mapping[str, nn.Parameter],
    gone: Container[int],
    context: ParallelContext,
    dtype: torch.dtype,
) -> dict[int, Partition]:
    """Move the model to the device and its weights to `dtype`, with the values of the first replica.

    Buffers keep their types, as in DeepSpeed. Parameters that `zero.Init` has sharded move to the meta
    device.

    Args:
        model: the model.
        params: its parameters by name, and those of experts that other ranks keep.
        gone: the ``id`` of the parameters that other ranks keep.
        context: this rank's groups and device.
        dtype: the dtype of the weights.

    Returns:
        The slices of the parameters that `zero.Init` has sharded, by ``id`` of the parameter.

    Raises:
        ConfigError: a parameter has no values, or another floating type although `dtype` is fp32, or an
            embedding has sparse gradients.
    """
    homes: dict[int, Partition] = {}
    for name, module in model.named_modules():
        if getattr(module, "sparse", False) and isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            raise ConfigError(
                f"`{name}` must have dense gradients, but is an embedding with sparse=True; leave that out"
            )
    for name, param in params.items():
        param.grad = None
        wanted = dtype if param.is_floating_point() else param.dtype
        if dtype == torch.float32 and param.dtype in (torch.float16, torch.bfloat16, torch.float64):
            raise ConfigError(
                f"`{name}` must be fp32 where neither fp16 nor bf16 is enabled, but is {param.dtype}; enable "
                "one of them or convert the model"
            )
        if (home := partition_of(param)) is not None:
            if id(param) in gone:
                home.whole()  # the other ranks need this rank's slice
                continue
            if hasattr(param, "spec") and param.spec.expert:
                home.move(context.groups["expert_replica"])
            homes[id(param)] = home
            for name in [n for n in param.__dict__ if n in _OF_PARTITIONS or n.startswith("ds_")]:
                del param.__dict__[name]
            empty = nn.Parameter(torch.empty(param.shape, dtype=wanted, device="meta"), param.requires_grad)
            empty.__dict__.update(param.__dict__)
            torch.utils.swap_tensors(param, empty)
        elif param.is_meta:
            raise ConfigError(
                f"`{name}` must have values, but is on the meta device; build the model within `zero.Init`"
            )
        else:
            value = _spread(param.data.to(context.device, wanted), context)
            param.data = value.new_empty(0) if id(param) in gone else value
    for buffer in model.buffers():
        buffer.data = _spread(buffer.data.to(context.device), context)
    return homes


def _spread(value: torch.Tensor, context: ParallelContext) -> torch.Tensor:
    """Copy the first replica's value to every replica."""
    value = value.contiguous()
    context.replica.broadcast(value, 0).wait()
    return value


@dataclass(frozen=True)
class Sharding:
    """How the parameters of a model are to be sharded.

    Attributes:
        client: the torch optimizer with their groups.
        policy: what is sharded, and where it lies.
        groups: the parameter group by ``id`` of the parameter.
        whole: numbers of the groups whose parameters are matrices that an optimizer needs whole.
        kind: makes the store.
    """

    client: Optimizer
    policy: ZeroPolicy
    groups: Mapping[int, int]
    whole: Set[int]
    kind: Callable[[ZeroPolicy], Store]


def build_parallel(
    model: nn.Module,
    how: Sharding,
    context: ParallelContext,
    homes: Mapping[int, Partition],
    units: Sequence[Unit],
    make: Callable[..., UserParallel] = UserParallel,
) -> UserParallel:
    """Move the model's parameters into the buckets of a store.

    Args:
        model: the model, or a stage.
        how: how its parameters are sharded.
        context: this rank's groups and device.
        homes: the slices of parameters without memory, by ``id``; each bucket gathers its own ones.
        units: the parts that are gathered together; see `user_units`.
        make: makes the result.
    """

    def fill(params: Sequence[nn.Parameter]) -> None:
        for param in params:
            param.data.copy_(homes[id(param)].whole())

    for param in model.parameters():
        if how.groups.get(id(param)) in how.whole:
            param.__dict__["spec"] = replace(spec_of(param), matrices=Matrices())
    store = build_store(units, how.policy, context, fill, how.groups, how.kind)
    return make(model, units, store, how.policy, context)


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
