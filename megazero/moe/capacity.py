"""Capacity: how many tokens of a sequence an expert takes, and which ones it leaves (GShard, 2020)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megazero.layers.inputs import LayerInputs
from megazero.moe.router import Routing, row_keys
from megazero.moe.tokens import Tokens
from megazero.ops.counter_random import hash_uniform
from megazero.spec.experts import CapacitySpec, RouterSpec

_ROUNDING = 1e-9  # a product of floats may exceed a whole number by this much


def factor_of(spec: CapacitySpec, inputs: LayerInputs) -> float | None:
    """The capacity factor; None if no token is dropped. Evaluation takes training's if it has none.

    Generation drops nothing: it sees a sequence token by token, and none of them may depend on later ones.
    """
    if inputs.generating:
        return None
    training = inputs.rows.keys is not None
    return spec.factor if training or spec.eval_factor is None else spec.eval_factor


def capacities(spec: RouterSpec, lengths: Tensor, experts: int, factor: float) -> Tensor:
    """The room of an expert for the choices of each sequence: int64 [b], ceil(length k / E factor).

    It is at least `capacity.least`.

    Args:
        lengths: int64 [b], tokens of each sequence.
    """
    room = (lengths.double() * (spec.topk * factor / experts) - _ROUNDING).ceil()
    return room.long().clamp_min(spec.capacity.least)


def capacity(spec: RouterSpec, length: int, experts: int, factor: float) -> int:
    """`capacities` of one sequence whose length the host knows."""
    room = math.ceil(length * (spec.topk * factor / experts) - _ROUNDING)
    return max(room, spec.capacity.least)


def kept_choices(
    spec: RouterSpec, layer: int, choice: Routing, tokens: Tokens, inputs: LayerInputs
) -> Tensor | None:
    """The choices that have room: bool [n, k]; None if no token is dropped.

    An expert takes the choices of a sequence, or with `capacity.together` of the micro-batch, which makes
    the result depend on its size, in the order of `capacity.policy`: ``probs`` takes those of the
    highest weight first, ``random`` any (random token selection of DeepSpeed-MoE, Rajbhandari et al. 2022),
    and ``position`` all first choices, then all second ones, each in order of position. This order also
    breaks the ties of the other policies.
    """
    experts = choice.probabilities.shape[1]
    factor = factor_of(spec.capacity, inputs)
    if factor is None:
        return None
    # All shares of the micro-batch: who is dropped is a matter of whole sequences, whatever ranks share them,
    # so every rank computes the same for all and takes its own part at the end.
    every = tokens.everywhere()
    chosen, sequence, lengths = tokens.whole(choice.experts), every.sequence, every.lengths
    if spec.capacity.together:
        sequence, lengths = torch.zeros_like(sequence), lengths.sum().view(1)
    room = capacities(spec, lengths, experts, factor)
    # Choice j of token i is number j * N + i: all first choices come before all second ones.
    # Its cell is the expert that it fell on, for this sequence alone; each cell has a room of its own.
    cell = (sequence.unsqueeze(1) * experts + chosen).t().reshape(-1)
    if every.real is not None:
        # Padding goes to one more cell, without room, so that it takes nobody's place.
        nowhere = len(lengths) * experts
        cell = torch.where(every.real.repeat(chosen.shape[1]), cell, nowhere)
    # By urgency, then by cell, both stably: the choices of a cell end up together, the most urgent first, and
    # equally urgent ones in the order of their numbers, on any device.
    order = torch.arange(len(cell), device=cell.device)
    if inputs.rows.spread.zigzag:  # shares do not follow each other as their tokens do
        order = order.view(-1, len(every.number))[:, every.number.argsort(stable=True)].flatten()
    if spec.capacity.policy != "position":
        urgency = _urgency(spec, layer, choice, tokens, inputs).t().reshape(-1)
        order = order[urgency[order].argsort(descending=True, stable=True)]
    order = order[cell[order].argsort(stable=True)]
    # The place of a choice in its cell: its place among all, less the number of choices in earlier cells.
    cells = len(lengths) * experts + 1
    filled = torch.zeros(cells, dtype=torch.int64, device=cell.device).scatter_add_(
        0, cell, torch.ones_like(cell)
    )
    place = torch.arange(len(cell), device=cell.device) - (filled.cumsum(0) - filled)[cell[order]]
    rooms = torch.cat([room.unsqueeze(1).expand(-1, experts).reshape(-1), room.new_zeros(1)])
    kept = torch.empty_like(cell, dtype=torch.bool).scatter_(0, order, place < rooms[cell[order]])
    return tokens.own(kept.view(chosen.shape[1], -1).t().contiguous())


@torch.no_grad()
def _urgency(spec: RouterSpec, layer: int, choice: Routing, tokens: Tokens, inputs: LayerInputs) -> Tensor:
    """The urgency of each choice, float32 [N, k]; the most urgent ones are taken first."""
    if spec.capacity.policy == "probs":
        return tokens.whole(choice.weights.detach())
    keys = inputs.rows.keys
    if keys is None:  # Evaluations drop by the same rule, at random but the same every time.
        keys = torch.zeros_like(tokens.lengths)
    rows = row_keys(keys, tokens, "router", layer, "selection")
    return tokens.whole(hash_uniform(rows.unsqueeze(1), choice.experts))
