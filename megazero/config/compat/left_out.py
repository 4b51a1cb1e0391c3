"""The meaning of the settings of experts that a script for Megatron-DeepSpeed leaves out.

The defaults here are Megatron-LM's. Such a script runs with them, and one line of warning says which of its
own defaults they replace.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from types import MappingProxyType
from typing import Any

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

_TOPK = "model.moe_router_topk"
_FACTOR = "model.moe_expert_capacity_factor"
_MEANT: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "--expert-interval 2": ("model.expert_interval", "model.moe_layer_freq"),
        "--topk 1 --moe-router-pre-softmax": (_TOPK,),
        "--moe-router-sampling second": ("model.moe_router_sampling",),
        "--moe-train-capacity-factor 1": (_FACTOR,),
        "--moe-min-capacity 4": ("model.moe_min_capacity",),
        "--moe-loss-coeff 0.1": ("model.moe_aux_loss_coeff",),
    }
)
"""The meaning of what is left out: flags -> the settings that are then missing."""


def left_out(flags: Set[str], settings: Mapping[str, Any]) -> str | None:
    """The line for a script that leaves out settings of experts; None if it leaves out none.

    Args:
        flags: names of the flags that were given.
        settings: path -> value of the settings that anything gives.
    """
    spelling = next((name for name in _SPELLINGS if name in flags), None)
    meant = [words for words, paths in _MEANT.items() if settings.keys().isdisjoint(paths)]
    if settings.get(_TOPK) != 2:
        meant = [words for words in meant if "sampling" not in words]
    if _FACTOR in settings and settings[_FACTOR] is None:
        meant = [words for words in meant if "capacity" not in words]
    if spelling is None or not meant:
        return None
    listed = " and ".join(f"`{words}`" for words in meant)
    return (
        f"`{spelling}` is Megatron-DeepSpeed's, where what is left out here means {listed}; the defaults "
        "here are Megatron-LM's, so write out what is meant."
    )
