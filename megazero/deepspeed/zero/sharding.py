"""Move a script's model into the buckets of a store: parameter groups, devices, types, first values."""

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

_OF_PARTITIONS = ("shard_holder", "__deepcopy__")


def group_numbers(model: nn.Module, groups: Sequence[Mapping[str, Any]]) -> dict[int, int]:
    """The group's number by ``id`` of the parameter. Parameters in no group are frozen, with a warning.

    Raises:
        ConfigError: a group holds a tensor that is no parameter of the model.
    """
    numbers = {id(param): number for number, group in enumerate(groups) for param in group["params"]}
    own = {id(param) for param in model.parameters()}
    foreign = sum(key not in own for key in numbers)
    if foreign:
        raise ConfigError(
            f"`optimizer` must only hold parameters of `model`, but {foreign} of {len(numbers)} are not; "
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
    """Move the model to the device and its weights to `dtype`, with the first replica's values.

    Buffers keep their types, as in DeepSpeed. Parameters that `zero.Init` has sharded move to the meta
    device.

    Args:
        model: the model.
        params: its parameters by name, including those of experts that other ranks hold from now on.
        gone: the ``id`` of the parameters of those experts.
        context: this rank's groups and device.
        dtype: the dtype of the weights.

    Returns:
        The partitions of the parameters that `zero.Init` has sharded, by ``id`` of the parameter.

    Raises:
        ConfigError: a parameter has no values or is not fp32 although `dtype` is, or an embedding has sparse
            gradients.
    """
    partitions: dict[int, Partition] = {}
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
        if (partition := partition_of(param)) is not None:
            if id(param) in gone:
                partition.whole()  # the ranks that hold the expert gather this rank's slice
                continue
            if hasattr(param, "spec") and param.spec.expert:
                partition.move(context.groups["expert_replica"])
            partitions[id(param)] = partition
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
            value = _broadcast_first(param.data.to(context.device, wanted), context)
            param.data = value.new_empty(0) if id(param) in gone else value
    for buffer in model.buffers():
        buffer.data = _broadcast_first(buffer.data.to(context.device), context)
    return partitions


def _broadcast_first(value: torch.Tensor, context: ParallelContext) -> torch.Tensor:
    """Broadcast the first replica's value to every replica."""
    value = value.contiguous()
    context.replica.broadcast(value, 0).wait()
    return value


@dataclass(frozen=True)
class ShardingPlan:
    """A plan for sharding the parameters of a model.

    Attributes:
        client: the torch optimizer with the parameter groups.
        policy: the ZeRO stage and the placement of state.
        groups: the group's number by ``id`` of the parameter.
        whole: the numbers of groups whose parameters the optimizer updates as whole matrices.
        kind: makes the store.
    """

    client: Optimizer
    policy: ZeroPolicy
    groups: Mapping[int, int]
    whole: Set[int]
    kind: Callable[[ZeroPolicy], Store]


def build_parallel(
    model: nn.Module,
    plan: ShardingPlan,
    context: ParallelContext,
    partitions: Mapping[int, Partition],
    units: Sequence[Unit],
    make: Callable[..., UserParallel] = UserParallel,
) -> UserParallel:
    """Move the model's parameters into the buckets of a store.

    Args:
        model: the model, or a stage.
        plan: the plan for its parameters.
        context: this rank's groups and device.
        partitions: the partitions of parameters on the meta device, by ``id``; a bucket gathers its own.
        units: the modules whose parameters are gathered together; see `user_units`.
        make: makes the result.
    """

    def fill(params: Sequence[nn.Parameter]) -> None:
        for param in params:
            param.data.copy_(partitions[id(param)].whole())

    for param in model.parameters():
        if plan.groups.get(id(param)) in plan.whole:
            param.__dict__["spec"] = replace(spec_of(param), matrices=Matrices())
    store = build_store(units, plan.policy, context, fill, plan.groups, plan.kind)
    return make(model, units, store, plan.policy, context)


# Modules whose forward reads the weights of their submodules without calling those.
_TOGETHER = (nn.MultiheadAttention,)


def user_units(model: nn.Module, tp_size: int) -> list[Unit]:
    """One unit per module that has parameters of its own or reads external ones, in module order.

    A parameter that Megatron's layers mark as tensor-parallel gets a spec with that cut.
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
