"""What a script for one of the Megatrons means by the flags that it leaves out."""

from __future__ import annotations

from collections.abc import Mapping, Set
from types import MappingProxyType
from typing import Any

from megazero.config.tree import ModelConfig

_GROUPS = "--num-query-groups"
_GROUPED = "--group-query-attention"


def ungrouped(flags: Set[str], model: ModelConfig) -> str | None:
    """The line on `--num-query-groups` alone, which Megatron-LM ignores; None if that is the same model.

    Args:
        flags: names of the flags that were given.
        model: the model that they describe.
    """
    if _GROUPS not in flags or _GROUPED in flags or model.kv_heads == model.num_attention_heads:
        return None
    return (
        f"`{_GROUPS} {model.kv_heads}` gives the model {model.kv_heads} key/value heads. Megatron-LM ignores "
        f"it without `{_GROUPED}` and trains one for each query head; leave it out for that model."
    )


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
"""What it means, as flags -> the settings that are then left out."""


def left_out(flags: Set[str], settings: Mapping[str, Any]) -> str | None:
    """What to say of a model with experts; None if there is nothing to say.

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
