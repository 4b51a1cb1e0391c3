"""DeepSpeed's gates as functions: which experts each token goes to, as dense masks (Lepikhin et al. 2020).

`MoE` itself routes without such masks, which take tokens x experts x capacity elements.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megazero.deepspeed.comm import collectives as dist
from megazero.deepspeed.comm.world import ReduceOp, get_world_size
from megazero.errors import ConfigError

Gated = tuple[Tensor, Tensor, Tensor, Tensor]
"""The balance loss, the weights of each token's places [s, e, c], where they are not zero, and how often each
expert was chosen, int64 [e]."""


def top1gating(
    logits: Tensor,
    capacity_factor: float,
    min_capacity: int,
    used_token: Tensor | None = None,
    noisy_gate_policy: str | None = None,
    drop_tokens: bool = True,
    use_rts: bool = True,
    ep_group: Any = None,
    use_tutel: bool = False,
) -> Gated:
    """Send each token to its most probable expert.

    Args:
        logits: [s, e], in fp32.
        capacity_factor: an expert has room for s / e times this, at least `min_capacity`.
        min_capacity: see there; at most s.
        used_token: [s], zero for tokens that no expert is to see.
        noisy_gate_policy: ``RSample`` chooses by logits with Gumbel noise.
        drop_tokens: False makes room for all.
        use_rts: let a full expert keep a random choice of its tokens, instead of the first ones.
        ep_group: the ranks that agree on the room if none is dropped.
        use_tutel: without effect.

    Raises:
        ConfigError: there are fewer tokens than `min_capacity`.
    """
    if len(logits) < min_capacity:
        raise ConfigError(
            f"`min_capacity` must be at most the number of tokens ({len(logits)}), but is {min_capacity}; "
            "set it to 0 or give larger batches"
        )
    noisy = logits + gumbel_rsample(logits.shape, logits.device) if noisy_gate_policy == "RSample" else logits
    chosen = _marked(noisy.argmax(1, keepdim=True), logits)
    if used_token is not None:
        chosen &= used_token.reshape(-1, 1) != 0
    gates, counts = logits.softmax(1), chosen.sum(0)
    loss = _balance(gates, chosen)
    room = _capacity(logits, capacity_factor, min_capacity) if drop_tokens else _agreed(counts, ep_group)
    order = (
        torch.rand_like(gates) if use_rts else torch.arange(len(gates), 0, -1, device=gates.device)[:, None]
    )
    kept = chosen & _best(torch.where(chosen, order.expand_as(gates), -1), room)
    return loss, *_masks(gates * kept, _places(kept), kept, room), counts


def top2gating(
    logits: Tensor,
    capacity_factor: float,
    min_capacity: int,
    drop_tokens: bool = True,
    ep_group: Any = None,
    top2_2nd_expert_sampling: bool = True,
) -> Gated:
    """Send each token to two experts; first choices go before second ones, earlier tokens before later ones.

    Args:
        logits, min_capacity, drop_tokens, ep_group: see `top1gating`.
        capacity_factor: an expert has room for 2 s / e times this, at least `min_capacity`.
        top2_2nd_expert_sampling: choose the second one by logits with Gumbel noise.
    """
    gates = logits.softmax(1)
    first = _marked(gates.argmax(1, keepdim=True), logits)
    noisy = logits + gumbel_rsample(logits.shape, logits.device) if top2_2nd_expert_sampling else logits
    second = _marked(noisy.masked_fill(first, -torch.inf).argmax(1, keepdim=True), logits)
    loss, counts = _balance(gates, first), (first | second).sum(0)
    room = _capacity(logits, 2 * capacity_factor, min_capacity) if drop_tokens else _agreed(counts, ep_group)
    places = torch.where(first, _places(first), _places(second) + first.sum(0))
    kept = (first | second) & (places < room)
    return loss, *_masks(_shares(gates, kept), places, kept, room), counts


def topkgating(
    logits: Tensor,
    k: int,
    capacity_factor: float,
    min_capacity: int,
    drop_tokens: bool = True,
    ep_group: Any = None,
    drop_policy: str = "probs",
) -> Gated:
    """Send each token to its k most probable experts.

    Args:
        logits, min_capacity, drop_tokens, ep_group: see `top1gating`.
        k: experts of each token.
        capacity_factor: an expert has room for k s / e times this, at least `min_capacity`.
        drop_policy: a full expert keeps the most probable tokens with ``probs``, the first with ``position``.

    Raises:
        ConfigError: there is no such policy.
    """
    if drop_policy not in ("probs", "position"):
        raise ConfigError(f"`drop_policy` must be probs or position, but is {drop_policy}; choose one")
    gates = logits.softmax(1)
    kept = chosen = _marked(gates.topk(k, 1).indices, logits)
    loss, counts = _balance(gates, chosen) / k, chosen.sum(0)
    room = _capacity(logits, k * capacity_factor, min_capacity) if drop_tokens else _agreed(counts, ep_group)
    if drop_policy == "probs" and drop_tokens:
        kept = chosen & _best(gates * chosen, room)
    places = _places(kept)
    kept = kept & (places < room)
    return loss, *_masks(_shares(gates, kept), places, kept, room), counts


def gumbel_rsample(shape: Any, device: torch.device) -> Tensor:
    """Gumbel noise."""
    return -torch.empty(shape, device=device).exponential_().log()


def multiplicative_jitter(x: Tensor, device: torch.device, epsilon: float = 1e-2) -> Tensor:
    """Numbers times uniform noise in 1 - `epsilon` to 1 + `epsilon`."""
    return x * (1 + epsilon * (2 * torch.rand(x.shape, device=device) - 1)) if epsilon else x


def _marked(experts: Tensor, like: Tensor) -> Tensor:
    """Whether each token [s] goes to each expert: bool [s, e]."""
    return torch.zeros_like(like, dtype=torch.bool).scatter_(1, experts, True)


def _balance(gates: Tensor, chosen: Tensor) -> Tensor:
    """The balance loss: 1 where loads are even and each token has one expert."""
    return (gates.mean(0) * chosen.float().mean(0)).sum() * gates.shape[1]


def _capacity(logits: Tensor, factor: float, least: int) -> int:
    return max(math.ceil(logits.shape[0] / logits.shape[1] * factor), least)


def _agreed(counts: Tensor, group: Any) -> int:
    """The load of the fullest expert, among all ranks of a group."""
    most = counts.max()
    if group is not None and get_world_size(group) > 1:
        dist.all_reduce(most, op=ReduceOp.MAX, group=group)
    return int(most)


def _best(scores: Tensor, room: int) -> Tensor:
    """Whether each is among the `room` best of its expert: bool [s, e]."""
    best = scores.topk(min(room, len(scores)), 0).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(0, best, True)


def _places(chosen: Tensor) -> Tensor:
    """The place of each token at each of its experts, in order: int64 [s, e]."""
    return chosen.cumsum(0) - 1


def _shares(gates: Tensor, kept: Tensor) -> Tensor:
    """The probabilities of the experts that have room, as shares of their sum."""
    held = gates * kept
    return held / held.sum(1, keepdim=True).clamp_min(torch.finfo(held.dtype).eps)


def _masks(weights: Tensor, places: Tensor, kept: Tensor, room: int) -> tuple[Tensor, Tensor]:
    """The weights by place [s, e, c], and where they are not zero."""
    combine = weights.unsqueeze(2) * F.one_hot(places * kept, max(room, 1)).to(weights.dtype)
    return combine, combine.bool()
