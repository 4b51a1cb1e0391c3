"""The meaning of the flags that a script for one of the Megatrons leaves out."""

from __future__ import annotations

from collections.abc import Mapping, Set
from math import gcd
from types import MappingProxyType
from typing import Any

from megazero.config.tree.model import ModelConfig

_GROUPS = "--num-query-groups"
_GROUPED = "--group-query-attention"

_OWN = (
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

_SHARED = (
    "--expert-interval",
    "--mlp-type",
    "--moe-eval-capacity-factor",
    "--moe-min-capacity",
    "--enable-expert-tensor-parallelism",
    "--ds-sequence-parallel-size",
    "--deepspeed",
)
"""Flags of Megatron-DeepSpeed, and not of Megatron-LM, that have the same name here."""

_MEGATRON_LM = frozenset(
    {"--num-moe-experts", "--expert-model-parallel-size", "--expert-tensor-parallel-size"}
)
"""Flags about experts that Megatron-DeepSpeed does not know, besides those that begin with `--moe-`."""

_TOPK = "model.moe_router_topk"
_FACTOR = "model.moe_expert_capacity_factor"
_EXPERT_RANKS = "parallel.expert_model_parallel_size"
_TENSOR_RANKS = "parallel.tensor_model_parallel_size"
_CHOICES: Mapping[int, Mapping[str, object]] = MappingProxyType(
    {1: {"model.moe_router_pre_softmax": True}, 2: {"model.moe_router_sampling": "second"}}
)
"""Experts per token -> DeepSpeed's settings for that number, as path -> value."""

_DROPPED = MappingProxyType({1: "random", 2: "position"})
"""Experts per token -> DeepSpeed's policy of dropping tokens; with more, the least probable are dropped."""


def megatron_deepspeed(flags: Set[str], settings: Mapping[str, Any]) -> tuple[str, dict[str, object]] | None:
    """Megatron-DeepSpeed's defaults of the settings about experts that its launch line leaves out.

    A line is Megatron-DeepSpeed's if it has a spelling that only Megatron-DeepSpeed knows, or one that it
    shares with this toolkit and none of Megatron-LM's.

    Args:
        flags: names of the flags that were given.
        settings: path -> value of the settings that anything gives.

    Returns:
        The spelling that tells, and path -> value; None for another line, or for a model without experts.
    """
    counts = settings.get("model.num_experts") or (1,)
    spelling = _spelling(flags, counts)
    if spelling is None or set(counts) == {1}:
        return None
    meant = {path: value for path, value in _meant(settings).items() if path not in settings}
    return spelling, meant


def fewer_expert_ranks(flags: Set[str], settings: Mapping[str, Any]) -> tuple[int, str] | None:
    """Return a smaller expert-parallel size, and a line, where the flag exceeds a layer's experts.

    DeepSpeed then spreads such a layer over as many ranks as it has experts; the placement of experts changes
    no number. None if the flag is not Megatron-DeepSpeed's, or does not exceed them.
    """
    ranks = settings.get(_EXPERT_RANKS, 1)
    if _OWN[0] not in flags or ranks < 1:
        return None
    counts = [count for count in settings.get("model.num_experts") or () if count > 1]
    odd = any(count % ranks and ranks % count for count in counts)
    if odd or all(count >= ranks for count in counts):
        return None
    fewer, said = gcd(ranks, *counts), f"as a layer has only {min(counts)} experts; the numbers are the same."
    return fewer, f"`{_OWN[0]} {ranks}` is read as {fewer}, {said}"


def _spelling(flags: Set[str], counts: tuple[int, ...]) -> str | None:
    own = next((name for name in _OWN if name in flags), None)
    foreign = {name for name in flags if name.startswith("--moe-")} | (_MEGATRON_LM & flags)
    if own is not None or foreign - {*_OWN, *_SHARED}:
        return own
    if "--num-experts" in flags and len(counts) > 1:
        return "--num-experts"
    return next((name for name in _SHARED if name in flags), None)


def _meant(settings: Mapping[str, Any]) -> dict[str, object]:
    """Path -> value of the defaults, given what else is set."""
    topk = settings.get(_TOPK, 1)
    meant: dict[str, object] = {_TOPK: 1}
    if settings.get("model.moe_layer_freq") is None:
        meant["model.expert_interval"] = 2
    scores = settings.get("model.moe_router_score_function", "softmax")
    if scores == "softmax" and settings.get("model.moe_router_num_groups") is None:
        meant |= _CHOICES.get(topk, {})
    factor = settings.get(_FACTOR, 1.0)
    if factor is not None and factor >= 0:
        meant |= {
            _FACTOR: 1.0,
            "model.moe_eval_capacity_factor": 1.0,
            "model.moe_min_capacity": 4,
            "model.moe_token_drop_policy": _DROPPED.get(topk, "probs"),
            "model.moe_capacity_scope": "micro_batch",
        }
    if settings.get("model.moe_router_load_balancing_type", ("aux_loss",)) == ("aux_loss",):
        meant["model.moe_aux_loss_coeff"] = (0.1,)
    if settings.get(_TENSOR_RANKS, 1) > 1:
        meant["parallel.expert_tensor_parallel_size"] = 1
    return meant


def ungrouped(flags: Set[str], model: ModelConfig) -> str | None:
    """Return the line on `--num-query-groups` alone, which Megatron-LM ignores; None if it changes nothing.

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
