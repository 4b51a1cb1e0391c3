"""The functions of `deepspeed.moe.utils`, for scripts that tell experts' parameters from others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

LARGEST_GROUP = 178_956_971


def is_moe_param(param: nn.Parameter) -> bool:
    """Whether a parameter belongs to an expert of a `MoE` layer."""
    return not getattr(param, "allreduce", True)


def is_moe_param_group(group: Mapping[str, Any]) -> bool:
    """Whether `split_params_into_different_moe_groups_for_optimizer` made a parameter group for experts."""
    return bool(group.get("moe", False))


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: Mapping[str, Any] | Sequence[Mapping[str, Any]], max_group_size: int | None = LARGEST_GROUP
) -> list[dict[str, Any]]:
    """Parameter groups in which experts' parameters are apart from others, as DeepSpeed's ZeRO needs them.

    Here experts may be in any group: this only lets scripts run, or give experts a learning rate of their
    own.

    Args:
        param_groups: one group, or several, such as ``{"params": [...], "name": "parameters"}``.
        max_group_size: most elements of a group of experts; None sets no limit.

    Returns:
        The groups without experts' parameters, then for each of them those of experts with the same options,
        marked by ``moe`` and named after DeepSpeed's group of ranks, such as ``ep_size_2``.
    """
    given = [param_groups] if isinstance(param_groups, Mapping) else list(param_groups)
    dense: list[dict[str, Any]] = []
    experts: list[dict[str, Any]] = []
    for group in given:
        params = list(group["params"])
        dense.append({**group, "params": [param for param in params if not is_moe_param(param)]})
        by_name: dict[str, list[nn.Parameter]] = {}
        for param in filter(is_moe_param, params):
            by_name.setdefault(getattr(param, "group_name", "experts"), []).append(param)
        for name, chosen in by_name.items():
            parts = _parts(chosen, max_group_size)
            experts += [{**group, "name": name, "moe": True, "params": part} for part in parts]
    return dense + experts


def _parts(params: Iterable[nn.Parameter], most: int | None) -> list[list[nn.Parameter]]:
    """The parameters in runs of at most `most` elements, or of one parameter that has more."""
    parts: list[list[nn.Parameter]] = []
    size = 0
    for param in params:
        if not parts or (most is not None and size + param.numel() > most):
            parts.append([])
            size = 0
        parts[-1].append(param)
        size += param.numel()
    return parts
