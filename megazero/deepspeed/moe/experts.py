"""MoE layers of a user's model: who holds which experts, and whole weights from all of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from megazero.deepspeed.moe.layer import EXPERTS, OLD_NAMES, MoE
from megazero.errors import ConfigError
from megazero.mpu.context import ParallelContext


def expert_layers(model: nn.Module) -> dict[str, MoE]:
    """The MoE layers by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, MoE)}


def agreed_ep_size(model: nn.Module) -> int:
    """How many ranks share the experts of each MoE layer; 1 without any.

    Raises:
        ConfigError: the layers disagree.
    """
    sizes = {name or "the model": layer.ep_size for name, layer in expert_layers(model).items()}
    if len(set(sizes.values())) > 1:
        by_layer = ", ".join(f"{size} in {name}" for name, size in sizes.items())
        raise ConfigError(
            f"`ep_size` must be the same in all MoE layers of a model, but is {by_layer}; choose one for all"
        )
    return next(iter(sizes.values()), 1)


def check_ep_size(model: nn.Module, context: ParallelContext) -> None:
    """Refuse a context, which the script may have brought, that does not share experts as the layers do.

    Raises:
        ConfigError: it has another expert-parallel size.
    """
    size, layers = agreed_ep_size(model), expert_layers(model)
    if layers and context.grid.ep != size:
        raise ConfigError(
            f"`ep_size` must be the size of the axis ep in the context that `mpu` is ({context.grid.ep}), "
            f"but is {size}; build the context with `ep={size}` or leave `mpu` out"
        )


def share_experts(model: nn.Module, context: ParallelContext) -> set[int]:
    """Leave each MoE layer only the experts of this rank; return the ``id`` of all parameters of the others.

    The parameters that stay get specs of their own.
    """
    gone: set[int] = set()
    for name, layer in expert_layers(model).items():
        gone |= {id(param) for param in layer.join(context)}
        layer.experts.name_parameters(_path(name))
    return gone


def without(groups: list[dict[str, Any]], gone: set[int]) -> None:
    """Remove parameters from an optimizer's groups; all ranks keep equally many groups."""
    for group in groups:
        group["params"] = [param for param in group["params"] if id(param) not in gone]


def with_all_experts(
    state: Mapping[str, Tensor], model: nn.Module, context: ParallelContext
) -> dict[str, Tensor]:
    """A module's state with the experts of all ranks, on the CPU; every rank calls this."""
    group = context.groups["ep"]
    paths = {f"{_path(name)}.": layer for name, layer in expert_layers(model).items()}
    if group.size == 1 or not paths:
        return dict(state)
    whole: dict[str, Tensor] = {}
    for key, value in state.items():
        path = next((path for path in paths if key.startswith(path)), None)
        if path is None:
            whole[key] = value
            continue
        number, _, rest = key.removeprefix(path).partition(".")
        per_rank = paths[path].num_experts // group.size
        mine = value.to(context.device).contiguous()
        everyone = mine.new_empty(group.size, *mine.shape)
        group.all_gather(everyone.view(-1), mine.view(-1)).wait()
        for rank, part in enumerate(torch.unbind(everyone.cpu())):
            whole[f"{path}{int(number) % per_rank + rank * per_rank}.{rest}"] = part.clone()
    return whole


def older_names(model: nn.Module, held: Iterable[str]) -> dict[str, str]:
    """Name in a checkpoint of an older release -> its present one, for what MoE layers have."""
    return {
        name: f"{start}{new}{name.removeprefix(start + old)}"
        for start in (f"{layer}." if layer else "" for layer in expert_layers(model))
        for old, new in OLD_NAMES.items()
        for name in held
        if name.startswith(start + old)
    }


def _path(layer: str) -> str:
    """The name of a layer's experts in the model."""
    return f"{layer}.{EXPERTS}" if layer else EXPERTS
