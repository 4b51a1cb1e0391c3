"""The functions of `deepspeed.moe.utils`, which separate experts' parameters from others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from megazero.deepspeed.moe.experts import expert_layers

LARGEST_GROUP = 178_956_971
"""DeepSpeed's default for the most elements of a parameter group of experts."""


def is_moe_param(param: nn.Parameter) -> bool:
    """Whether a parameter belongs to an expert of a `MoE` layer."""
    return not getattr(param, "allreduce", True)


def is_moe_param_group(group: Mapping[str, object]) -> bool:
    """Whether a parameter group is of experts, by its mark ``moe``."""
    return bool(group.get("moe", False))


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: Mapping[str, Any] | Sequence[Mapping[str, Any]], max_group_size: int | None = LARGEST_GROUP
) -> list[dict[str, object]]:
    """Move experts' parameters to parameter groups of their own.

    DeepSpeed's ZeRO needs this. Here experts may be in any group, so it only serves for options of their own.

    Args:
        param_groups: one group, or several, such as ``{"params": [...], "name": "parameters"}``.
        max_group_size: the most elements of a group of experts; None for no limit.

    Returns:
        The groups without experts' parameters, followed by groups of experts with the same options, marked by
        ``moe`` and named after DeepSpeed's group of ranks, such as ``ep_size_2``.
    """
    groups = [param_groups] if isinstance(param_groups, Mapping) else list(param_groups)
    dense: list[dict[str, object]] = []
    experts: list[dict[str, object]] = []
    for group in groups:
        params = list(group["params"])
        dense.append({**group, "params": [param for param in params if not is_moe_param(param)]})
        by_name: dict[str, list[nn.Parameter]] = {}
        for param in filter(is_moe_param, params):
            by_name.setdefault(getattr(param, "group_name", "experts"), []).append(param)
        for name, chosen in by_name.items():
            parts = _parts(chosen, max_group_size)
            experts += [{**group, "name": name, "moe": True, "params": part} for part in parts]
    return dense + experts


def configure_moe_param_groups(
    model_parameters: Sequence[Tensor] | Sequence[Mapping[str, Any]],
) -> list[dict[str, object]]:
    """Split parameters, or groups of them, into groups without and with experts' parameters."""
    groups: Any = model_parameters
    if model_parameters and isinstance(model_parameters[0], Tensor):
        groups = [{"params": list(model_parameters), "name": "dense-params"}]
    return split_params_into_different_moe_groups_for_optimizer(groups)


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """Return whether a model has a `MoE` layer, and the number of experts in the first one."""
    counts = [layer.num_experts for layer in expert_layers(m).values()]
    return bool(counts), counts[0] if counts else 0


def split_params_into_shared_and_expert_params(
    params: Iterable[nn.Parameter],
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the parameters that are not experts', and those that are."""
    params = list(params)
    return [p for p in params if not is_moe_param(p)], [p for p in params if is_moe_param(p)]


def split_params_grads_into_shared_and_expert_params(
    group: Iterable[nn.Parameter],
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the gradients of parameters that are not experts', and of those that are."""
    shared, experts = split_params_into_shared_and_expert_params(group)
    return [p.grad for p in shared if p.grad is not None], [p.grad for p in experts if p.grad is not None]


def _parts(params: Iterable[nn.Parameter], most: int | None) -> list[list[nn.Parameter]]:
    """Split parameters into runs of at most `most` elements, or of one larger parameter."""
    parts: list[list[nn.Parameter]] = []
    size = 0
    for param in params:
        if not parts or (most is not None and size + param.numel() > most):
            parts.append([])
            size = 0
        parts[-1].append(param)
        size += param.numel()
    return parts
