"""The MoE layers of a user's model: sharing experts over ranks, and gathering their weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

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


def names_on_ranks(name: str, model: nn.Module, context: ParallelContext) -> list[tuple[str, int | None]]:
    """The tensors of the whole model that expert-parallel ranks hold where this rank holds `name`.

    Returns:
        The name and the expert-parallel rank of each: an expert's counterparts on all ranks. Any other tensor
        is itself, on all ranks: None.
    """
    ranks = context.groups["ep"].size
    for path, layer in expert_layers(model).items() if ranks > 1 else ():
        if name.startswith(start := f"{_path(path)}."):
            number, _, rest = name.removeprefix(start).partition(".")
            per_rank = layer.num_experts // ranks
            return [(f"{start}{int(number) % per_rank + r * per_rank}.{rest}", r) for r in range(ranks)]
    return [(name, None)]


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
