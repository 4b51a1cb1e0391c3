"""What a script for Megatron-DeepSpeed means by the settings of experts that it leaves out.

The defaults here are Megatron-LM's. Such a script runs with them, and one line of warning says which of its
own defaults they replace.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from types import MappingProxyType

_SPELLINGS = (
    "--moe-expert-parallel-size",
    "--moe-loss-coeff",
    "--moe-train-capacity-factor",
    "--create-moe-param-group",
    "--disable-moe-token-dropping",
    "--disable-moe-top2-2nd-expert-sampling",
    "--use-tutel",
    "--topk",
)
"""Flags that only Megatron-DeepSpeed knows."""

_MEANT: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "--expert-interval 2": ("model.expert_interval", "model.moe_layer_freq"),
        "--topk 1 --moe-router-pre-softmax": ("model.moe_router_topk",),
        "--moe-train-capacity-factor 1": ("model.moe_expert_capacity_factor",),
        "--moe-loss-coeff 0.1": ("model.moe_aux_loss_coeff",),
    }
)
"""What it means, as flags -> the settings that are then left out."""


def left_out(flags: Set[str], settings: Set[str]) -> str | None:
    """What to say of a model with experts; None if there is nothing to say.

    Args:
        flags: names of the flags that were given.
        settings: paths of the settings that anything gives.
    """
    spelling = next((name for name in _SPELLINGS if name in flags), None)
    meant = [f"`{words}`" for words, paths in _MEANT.items() if settings.isdisjoint(paths)]
    if spelling is None or not meant:
        return None
    return (
        f"`{spelling}` is of Megatron-DeepSpeed, where a script that leaves them out means "
        f"{' and '.join(meant)}; here it means Megatron-LM's defaults, so add what is meant."
    )
