"""DeepSpeed's gates as functions: the experts of each token as dense masks (Lepikhin et al. 2020).

`MoE` does not use such masks, because they have tokens x experts x capacity elements.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from megazero.deepspeed.comm import collectives as dist
from megazero.deepspeed.comm.world import AnyGroup, ReduceOp, get_world_size
from megazero.errors import ConfigError

Gated = tuple[Tensor, Tensor, Tensor, Tensor]
"""The balance loss; the weight of each token at each expert's capacity slot, [s, e, c]; whether that weight
is nonzero; and how often each expert was chosen, int64 [e]."""


def top1gating(
    logits: Tensor,
    capacity_factor: float,
    min_capacity: int,
    used_token: Tensor | None = None,
    noisy_gate_policy: str | None = None,
    drop_tokens: bool = True,
    use_rts: bool = True,
    ep_group: AnyGroup = None,
    use_tutel: bool = False,
) -> Gated:
    """Send each token to its most probable expert.

    Args:
        logits: fp32 [s, e].
        capacity_factor: the capacity of an expert is s / e times this, or `min_capacity` if that is larger.
        min_capacity: the least capacity, at most s.
        used_token: [s], zero for tokens that no expert should see.
        noisy_gate_policy: ``RSample`` chooses by logits with Gumbel noise.
        drop_tokens: whether capacity is limited; otherwise it fits the fullest expert.
        use_rts: whether a full expert keeps a random choice of its tokens; otherwise the first ones.
        ep_group: the ranks over which the fullest expert is looked for, without `drop_tokens`.
        use_tutel: has no effect.

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
    ep_group: AnyGroup = None,
    top2_2nd_expert_sampling: bool = True,
) -> Gated:
    """Send each token to two experts; a full expert keeps first choices before second ones, in token order.

    Args:
        logits, min_capacity, drop_tokens, ep_group: see `top1gating`.
        capacity_factor: the capacity of an expert is 2 s / e times this, or `min_capacity` if that is larger.
        top2_2nd_expert_sampling: whether to choose the second expert by logits with Gumbel noise.
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
    ep_group: AnyGroup = None,
    drop_policy: str = "probs",
) -> Gated:
    """Send each token to its k most probable experts.

    Args:
        logits, min_capacity, drop_tokens, ep_group: see `top1gating`.
        k: the number of experts of each token.
        capacity_factor: the capacity of an expert is k s / e times this, or `min_capacity` if that is larger.
        drop_policy: ``probs`` keeps the most probable tokens of a full expert, ``position`` the first ones.

    Raises:
        ConfigError: the policy is unknown.
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


def gumbel_rsample(shape: Sequence[int], device: torch.device) -> Tensor:
    """Draw Gumbel noise."""
    return -torch.empty(shape, device=device).exponential_().log()


def multiplicative_jitter(x: Tensor, device: torch.device, epsilon: float = 1e-2) -> Tensor:
    """Multiply x by uniform noise in 1 - `epsilon` to 1 + `epsilon`."""
    return x * (1 + epsilon * (2 * torch.rand(x.shape, device=device) - 1)) if epsilon else x


def _marked(experts: Tensor, like: Tensor) -> Tensor:
    """Return whether each token goes to each expert, bool [s, e], from the indices of experts [s, k]."""
    return torch.zeros_like(like, dtype=torch.bool).scatter_(1, experts, True)


def _balance(gates: Tensor, chosen: Tensor) -> Tensor:
    """Return the balance loss, which is 1 if loads are even and each token has one expert."""
    return (gates.mean(0) * chosen.float().mean(0)).sum() * gates.shape[1]


def _capacity(logits: Tensor, factor: float, least: int) -> int:
    return max(math.ceil(logits.shape[0] / logits.shape[1] * factor), least)


def _agreed(counts: Tensor, group: AnyGroup) -> int:
    """Return the load of the fullest expert over all ranks of a group."""
    most = counts.max()
    if group is not None and get_world_size(group) > 1:
        dist.all_reduce(most, op=ReduceOp.MAX, group=group)
    return int(most)


def _best(scores: Tensor, room: int) -> Tensor:
    """Return whether a token's score is among the `room` best of an expert, bool [s, e]."""
    best = scores.topk(min(room, len(scores)), 0).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(0, best, True)


def _places(chosen: Tensor) -> Tensor:
    """Return the slot of each token at each of its experts, by order: int64 [s, e]."""
    return chosen.cumsum(0) - 1


def _shares(gates: Tensor, kept: Tensor) -> Tensor:
    """Return the probabilities of a token's experts with room, normalized to sum 1."""
    probabilities = gates * kept
    return probabilities / probabilities.sum(1, keepdim=True).clamp_min(torch.finfo(gates.dtype).eps)


def _masks(weights: Tensor, places: Tensor, kept: Tensor, room: int) -> tuple[Tensor, Tensor]:
    """Return the weights by slot [s, e, c], and whether they are nonzero."""
    combine = weights.unsqueeze(2) * F.one_hot(places * kept, max(room, 1)).to(weights.dtype)
    return combine, combine.bool()
