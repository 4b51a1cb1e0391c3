"""The MoE layers of a user's model: sharing experts over ranks, and gathering their weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from megazero.deepspeed.moe.layer import EXPERTS, OLD_NAMES, MoE
from megazero.errors import ConfigError
from megazero.mpu.context import ParallelContext


def expert_layers(model: nn.Module) -> dict[str, MoE]:
    """Return name -> layer for the MoE layers of a model."""
    return {name: module for name, module in model.named_modules() if isinstance(module, MoE)}


def agreed_ep_size(model: nn.Module) -> int:
    """Return the `ep_size` of all MoE layers; 1 without layers.

    Raises:
        ConfigError: the layers have different sizes.
    """
    sizes = {name or "the model": layer.ep_size for name, layer in expert_layers(model).items()}
    if len(set(sizes.values())) > 1:
        by_layer = ", ".join(f"{size} in {name}" for name, size in sizes.items())
        raise ConfigError(
            f"`ep_size` must be the same in all MoE layers of a model, but is {by_layer}; choose one for all"
        )
    return next(iter(sizes.values()), 1)


def check_ep_size(model: nn.Module, context: ParallelContext) -> None:
    """Check that a context, which a script may have passed, has the layers' `ep_size`.

    Raises:
        ConfigError: the context has another expert-parallel size.
    """
    size, layers = agreed_ep_size(model), expert_layers(model)
    if layers and context.grid.ep != size:
        raise ConfigError(
            f"`ep_size` must be the size of the axis ep in the context that `mpu` is ({context.grid.ep}), "
            f"but is {size}; build the context with `ep={size}` or leave `mpu` out"
        )


def share_experts(model: nn.Module, context: ParallelContext) -> set[int]:
    """Remove the experts of other ranks from each MoE layer; return the ``id`` of the removed parameters.

    The remaining parameters get their specs.
    """
    removed: set[int] = set()
    for name, layer in expert_layers(model).items():
        removed |= {id(param) for param in layer.join(context)}
        layer.experts.name_parameters(_path(name))
    return removed


def without(groups: list[dict[str, Any]], removed: set[int]) -> None:
    """Remove parameters from an optimizer's groups; keep empty groups, as ranks need equally many."""
    for group in groups:
        group["params"] = [param for param in group["params"] if id(param) not in removed]


def with_all_experts(
    state: Mapping[str, Tensor], model: nn.Module, context: ParallelContext
) -> dict[str, Tensor]:
    """Add the experts of all ranks to a module's state, on the CPU; every rank calls this."""
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
        own = value.to(context.device).contiguous()
        gathered = own.new_empty(group.size, *own.shape)
        group.all_gather(gathered.view(-1), own.view(-1)).wait()
        for rank, part in enumerate(torch.unbind(gathered.cpu())):
            whole[f"{path}{int(number) % per_rank + rank * per_rank}.{rest}"] = part.clone()
    return whole


def older_names(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Return name in an older release's checkpoint -> present name, for the tensors of MoE layers."""
    return {
        name: f"{start}{new}{name.removeprefix(start + old)}"
        for start in (f"{layer}." if layer else "" for layer in expert_layers(model))
        for old, new in OLD_NAMES.items()
        for name in names
        if name.startswith(start + old)
    }


def _path(layer: str) -> str:
    """Return the path of a layer's experts in the model."""
    return f"{layer}.{EXPERTS}" if layer else EXPERTS
