"""Capacity: how many tokens of a sequence an expert takes, and which ones are dropped (GShard, 2020)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megazero.layers.inputs import LayerInputs
from megazero.moe.router import Routing, row_keys
from megazero.moe.tokens import Tokens
from megazero.ops.counter_random import hash_uniform
from megazero.spec.experts import CapacitySpec, RouterSpec

_ROUNDING = 1e-9  # subtracted before a ceil: a product of floats may exceed an integer by this much


def factor_of(spec: CapacitySpec, inputs: LayerInputs) -> float | None:
    """The capacity factor; None if no token is dropped. Evaluation without a factor uses training's.

    Generation drops nothing: it sees a sequence token by token, and no token may depend on later ones.
    """
    if inputs.generating:
        return None
    training = inputs.rows.keys is not None
    return spec.factor if training or spec.eval_factor is None else spec.eval_factor


def capacities(spec: RouterSpec, lengths: Tensor, experts: int, factor: float) -> Tensor:
    """An expert's capacity for each sequence, int64 [b]: ceil(length k / E factor), or `capacity.least`.

    Args:
        lengths: int64 [b], tokens of each sequence.
    """
    room = (lengths.double() * (spec.topk * factor / experts) - _ROUNDING).ceil()
    return room.long().clamp_min(spec.capacity.least)


def capacity(spec: RouterSpec, length: int, experts: int, factor: float) -> int:
    """An expert's capacity for one sequence of `length` tokens, computed on the host (see `capacities`)."""
    room = math.ceil(length * (spec.topk * factor / experts) - _ROUNDING)
    return max(room, spec.capacity.least)


def kept_choices(
    spec: RouterSpec, layer: int, choice: Routing, tokens: Tokens, inputs: LayerInputs
) -> Tensor | None:
    """Return which choices are within their expert's capacity: bool [n, k]; None if no token is dropped.

    Capacity is per sequence, or with `capacity.together` per micro-batch (the result then depends on its
    size). An expert takes choices in the order of `capacity.policy`: ``probs`` by weight, highest first,
    ``random`` in random order (random token selection of DeepSpeed-MoE, Rajbhandari et al. 2022), and
    ``position`` all first choices, then all second ones, each by position. The order of ``position`` also
    breaks ties of the other policies.
    """
    experts = choice.probabilities.shape[1]
    factor = factor_of(spec.capacity, inputs)
    if factor is None:
        return None
    # Dropping is decided for whole sequences, which ranks may share: each rank decides for the tokens of all
    # shares, and takes its own share of the result at the end.
    every = tokens.everywhere()
    chosen, sequence, lengths = tokens.whole(choice.experts), every.sequence, every.lengths
    if spec.capacity.together:
        sequence, lengths = torch.zeros_like(sequence), lengths.sum().view(1)
    room = capacities(spec, lengths, experts, factor)
    # Choice j of token i is number j * N + i: all first choices come before all second ones. Its cell is the
    # pair (sequence, expert); each cell has its own capacity.
    cell = (sequence.unsqueeze(1) * experts + chosen).t().reshape(-1)
    if every.real is not None:
        # Padding goes to an extra cell of capacity 0, so that it displaces no token.
        padding_cell = len(lengths) * experts
        cell = torch.where(every.real.repeat(chosen.shape[1]), cell, padding_cell)
    # Sort by priority, then by cell, both stably: the choices of a cell become adjacent, the highest priority
    # first, and ties in the order of their numbers, on any device.
    order = torch.arange(len(cell), device=cell.device)
    if inputs.rows.spread.zigzag:  # shares are not in the order of positions
        order = order.view(-1, len(every.number))[:, every.number.argsort(stable=True)].flatten()
    if spec.capacity.policy != "position":
        priority = _priority(spec, layer, choice, tokens, inputs).t().reshape(-1)
        order = order[priority[order].argsort(descending=True, stable=True)]
    order = order[cell[order].argsort(stable=True)]
    # A choice's rank in its cell: its rank in this order, less the number of choices in earlier cells.
    cells = len(lengths) * experts + 1
    filled = torch.zeros(cells, dtype=torch.int64, device=cell.device).scatter_add_(
        0, cell, torch.ones_like(cell)
    )
    rank = torch.arange(len(cell), device=cell.device) - (filled.cumsum(0) - filled)[cell[order]]
    rooms = torch.cat([room.unsqueeze(1).expand(-1, experts).reshape(-1), room.new_zeros(1)])
    kept = torch.empty_like(cell, dtype=torch.bool).scatter_(0, order, rank < rooms[cell[order]])
    return tokens.own(kept.view(chosen.shape[1], -1).t().contiguous())


@torch.no_grad()
def _priority(spec: RouterSpec, layer: int, choice: Routing, tokens: Tokens, inputs: LayerInputs) -> Tensor:
    """The priority of each choice of all shares, float32 [N, k]; experts take the highest first."""
    if spec.capacity.policy == "probs":
        return tokens.whole(choice.weights.detach())
    keys = inputs.rows.keys
    if keys is None:  # evaluation drops by fixed random numbers, the same every time
        keys = torch.zeros_like(tokens.lengths)
    rows = row_keys(keys, tokens, "router", layer, "selection")
    return tokens.whole(hash_uniform(rows.unsqueeze(1), choice.experts))
