"""The loss terms of routers: losses that balance loads, and figures that are only reported."""

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

# Megatron-LM's name of a balance loss -> the name of its loss term, and the divisor of the term's sum.
_BALANCE = MappingProxyType(
    {
        "aux_loss": ("load_balancing", "micro_batches"),
        "seq_aux_loss": ("seq_load_balancing", "sequences"),
        "global_aux_loss": ("global_load_balancing", "tokens"),
    }
)
_Z, _ENTROPY, _DROPPED = "z", "router_entropy", "dropped_tokens"


def terms_of(spec: RouterSpec) -> tuple[LossTerm, ...]:
    """The loss terms of a model's routers; those with coefficient 0 are only reported."""
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
    """One router's sums for one micro-batch.

    Attributes:
        terms: name of a loss term -> float32 scalar, the same on all tensor-parallel ranks; context-parallel
            ranks have summands.
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

    Let c_e be the number of choices of expert e, p_te the probabilities, T the tokens and k the choices per
    token. ``seq_aux_loss`` and ``aux_loss`` are E / (k T^2) sum_e c_e sum_t p_te (Fedus et al. 2021) over
    each sequence and over the micro-batch. ``global_aux_loss`` is E sum_e f_e sum_t p_te, where f_e are the
    loads of the last step: so the global batch decides which experts are overloaded, and the loss does not
    wait for its end. Choices count before any is dropped. The z-loss is the sum of the squared logsumexp of
    the logits (ST-MoE, Zoph et al. 2022).

    Args:
        kept: bool [n, k], the choices within capacity; None for all.
        load: float32 [E], f.
        layers: number of layers with a router; figures that are only reported are means over them.
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
        sums = blank.index_add(0, tokens.sequence, tokens.masked(choice.probabilities))
        sums = reduce_from_slices(sums, tokens.sharers)
        tokens.sharers.all_reduce(counts).wait()
        lengths = tokens.lengths.clamp_min(1).float()
        for kind, _ in spec.balance:
            if kind == "seq_aux_loss":
                value = switch_loss(counts, sums, lengths, k).sum()
            elif kind == "aux_loss":
                total = tokens.lengths.sum().clamp_min(1).float()
                value = switch_loss(counts.sum(0), sums.sum(0), total, k)
            else:
                even = torch.full_like(sums[0], 1 / experts)
                value = ((even if load is None else load) * sums.sum(0)).sum() * experts
            terms[_BALANCE[kind][0]] = _summand(value, tokens.sharers.size // group.size)
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


def _summand(value: Tensor, ranks: int) -> Tensor:
    """A value that `ranks` ranks have in common, divided by their number, with its gradient undivided.

    Each rank's gradient is only that of its own tokens, so the sum over ranks counts no gradient twice.
    """
    return value if ranks == 1 else value - value.detach() * (1 - 1 / ranks)


def switch_loss(counts: Tensor, probability_sums: Tensor, tokens: Tensor, k: int) -> Tensor:
    """E / (k T^2) sum_e c_e sum_t p_te (Fedus et al. 2021), which is 1 if loads are even.

    Args:
        counts: float32 [..., E], c.
        probability_sums: float32 [..., E], the sum over tokens of each expert's probability.
        tokens: float32 [...], T.
        k: number of choices of each token in `counts`.
    """
    return (counts * probability_sums).sum(-1) / tokens.square() * (counts.shape[-1] / k)


@torch.no_grad()
def _entropy(choice: Routing, tokens: Tokens) -> Tensor:
    """The sum over tokens of the entropy of their probabilities, in nats."""
    return tokens.masked(torch.special.entr(choice.probabilities).sum(1)).sum()
