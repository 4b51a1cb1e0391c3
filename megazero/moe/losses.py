"""The loss terms of routers: losses that keep loads even, and figures that are only reported."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from megazero.layers.collectives import reduce_from_slices
from megazero.loss import LossTerm
from megazero.moe.router import Routing
from megazero.moe.tokens import Tokens
from megazero.spec.experts import RouterSpec

# Megatron's names of the kinds of balance losses -> our terms, and the divisors of their sums.
_BALANCE = MappingProxyType(
    {
        "aux_loss": ("load_balancing", "micro_batches"),
        "seq_aux_loss": ("seq_load_balancing", "sequences"),
        "global_aux_loss": ("global_load_balancing", "tokens"),
    }
)
_Z, _ENTROPY, _DROPPED = "z", "router_entropy", "dropped_tokens"


def terms_of(spec: RouterSpec) -> tuple[LossTerm, ...]:
    """The loss terms that routers of a model add to; those with coefficient 0 are only reported."""
    terms = [
        LossTerm(_BALANCE[kind][0], coefficient, over=_BALANCE[kind][1]) for kind, coefficient in spec.balance
    ]
    if spec.z_loss:
        terms.append(LossTerm(_Z, spec.z_loss, over="tokens"))
    terms.append(LossTerm(_ENTROPY, 0.0, over="tokens"))
    if spec.capacity.drops:
        terms.append(LossTerm(_DROPPED, 0.0, over="tokens"))
    return tuple(terms)


@dataclass(frozen=True)
class RouterSums:
    """The sums that one router adds to the loss terms in one micro-batch.

    Attributes:
        terms: name of a loss term -> float32 scalar, the same on all tensor-parallel ranks. Those of ranks
            that share sequences add up.
        tokens: float32 [E], how often this rank's tokens chose each expert, before any is dropped.
    """

    terms: dict[str, Tensor]
    tokens: Tensor


def router_terms(
    spec: RouterSpec,
    choice: Routing,
    tokens: Tokens,
    kept: Tensor | None,
    load: Tensor | None,
    layers: int,
) -> RouterSums:
    """Compute a router's sums for this micro-batch.

    With c_e the number of choices of expert e, p_te the probabilities, T tokens and k choices of each, the
    balance losses are E / (k T^2) sum_e c_e sum_t p_te (Fedus et al. 2021) over each sequence, or over the
    micro-batch; or E sum_e f_e sum_t p_te with the shares f_e of the whole last step, so that what counts as
    even is decided by the global batch and yet known before it ends. Choices count before any is dropped.
    The z-loss is the sum of the squared logsumexp of the logits (ST-MoE, Zoph et al. 2022).

    Args:
        spec: the model's routers.
        choice: the router's decision for this rank's share.
        tokens: this rank's share.
        kept: bool [n, k], the choices that have room; None for all.
        load: float32 [E], f.
        layers: how many layers have a router; figures that are only reported are means over them.
    """
    experts = choice.probabilities.shape[1]
    k, sequences, group = choice.experts.shape[1], len(tokens.lengths), tokens.columns
    ones = tokens.masked(torch.ones_like(choice.experts, dtype=torch.float32))
    cell = (tokens.sequence.unsqueeze(1) * experts + choice.experts).reshape(-1)
    counts = ones.new_zeros(sequences * experts).scatter_add_(0, cell, ones.reshape(-1))
    counts = counts.view(sequences, experts)
    own_tokens = counts.sum(0)
    terms = {}
    if spec.balance:
        blank = choice.probabilities.new_zeros(sequences, experts)
        spread = blank.index_add(0, tokens.sequence, tokens.masked(choice.probabilities))
        spread = reduce_from_slices(spread, tokens.sharers)
        tokens.sharers.all_reduce(counts).wait()
        lengths = tokens.lengths.clamp_min(1).float()
        for kind, _ in spec.balance:
            if kind == "seq_aux_loss":
                value = switch_loss(counts, spread, lengths, k).sum()
            elif kind == "aux_loss":
                total = tokens.lengths.sum().clamp_min(1).float()
                value = switch_loss(counts.sum(0), spread.sum(0), total, k)
            else:
                even = torch.full_like(spread[0], 1 / experts)
                value = ((even if load is None else load) * spread.sum(0)).sum() * experts
            terms[_BALANCE[kind][0]] = _share(value, tokens.sharers.size // group.size)
    if spec.z_loss:
        squares = tokens.masked(choice.logits.logsumexp(1).square())
        terms[_Z] = reduce_from_slices(squares.sum(), group)
    reported = {_ENTROPY: _entropy(choice, tokens)}
    if spec.capacity.drops:
        reported[_DROPPED] = ones.new_zeros(()) if kept is None else (ones * ~kept).sum() / k
    together = torch.stack(list(reported.values())) / layers
    group.all_reduce(together).wait()
    terms.update(zip(reported, together.unbind(), strict=True))
    return RouterSums(terms, own_tokens)


def _share(value: Tensor, ranks: int) -> Tensor:
    """One rank's part of a value that so many have alike, which has the gradient of all of it.

    Each rank's gradient is that of its own tokens, so nothing of it is counted twice.
    """
    return value if ranks == 1 else value - value.detach() * (1 - 1 / ranks)


def switch_loss(counts: Tensor, spread: Tensor, tokens: Tensor, k: int) -> Tensor:
    """E / (k T^2) sum_e c_e sum_t p_te (Fedus et al. 2021), which is 1 where loads are even.

    Args:
        counts: float32 [..., E], c.
        spread: float32 [..., E], the sums of the probabilities of each expert over the tokens.
        tokens: float32 [...], T.
        k: choices of each token that `counts` has.
    """
    return (counts * spread).sum(-1) / tokens.square() * (counts.shape[-1] / k)


@torch.no_grad()
def _entropy(choice: Routing, tokens: Tokens) -> Tensor:
    """The sum of the entropies of the probabilities, in nats."""
    return tokens.masked(torch.special.entr(choice.probabilities).sum(1)).sum()
