"""Capacity: how many tokens of a sequence an expert takes, and which ones it leaves (GShard, 2020)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megazero.config.tree.routing import RoutingConfig
from megazero.layers.inputs import LayerInputs
from megazero.moe.router import Routing, row_keys
from megazero.moe.tokens import Tokens
from megazero.ops.counter_random import hash_uniform

_ROUNDING = 1e-9  # a product of floats may exceed a whole number by this much


def factor_of(config: RoutingConfig, inputs: LayerInputs) -> float | None:
    """The capacity factor; None if no token is dropped. Evaluation takes training's if it has none.

    Generation drops nothing: it sees a sequence token by token, and none of them may depend on later ones.
    """
    if inputs.generating:
        return None
    training = inputs.rows.keys is not None
    if training or config.moe_eval_capacity_factor is None:
        return config.moe_expert_capacity_factor
    return config.moe_eval_capacity_factor


def capacities(config: RoutingConfig, lengths: Tensor, experts: int, factor: float) -> Tensor:
    """The room of an expert for the choices of each sequence: int64 [b], ceil(length k / E factor).

    It is at least `moe_min_capacity`.

    Args:
        lengths: int64 [b], tokens of each sequence.
    """
    room = (lengths.double() * (config.moe_router_topk * factor / experts) - _ROUNDING).ceil()
    return room.long().clamp_min(config.moe_min_capacity)


def capacity(config: RoutingConfig, length: int, experts: int, factor: float) -> int:
    """`capacities` of one sequence whose length the host knows."""
    room = math.ceil(length * (config.moe_router_topk * factor / experts) - _ROUNDING)
    return max(room, config.moe_min_capacity)


def kept_choices(
    config: RoutingConfig, layer: int, choice: Routing, tokens: Tokens, inputs: LayerInputs
) -> Tensor | None:
    """The choices that have room: bool [n, k]; None if no token is dropped.

    An expert takes the choices of a sequence, or with `moe_capacity_scope` of the micro-batch, which makes
    the result depend on its size, in the order of `moe_token_drop_policy`: ``probs`` takes those of the
    highest weight first, ``random`` any (random token selection of DeepSpeed-MoE, Rajbhandari et al. 2022),
    and ``position`` all first choices, then all second ones, each in order of position. This order also
    breaks the ties of the other policies.
    """
    experts = choice.probabilities.shape[1]
    factor = factor_of(config, inputs)
    if factor is None:
        return None
    # All shares of the micro-batch: who is dropped is a matter of whole sequences, whatever ranks share them,
    # so every rank computes the same for all and takes its own part at the end.
    every = tokens.everywhere()
    chosen, sequence, lengths = tokens.whole(choice.experts), every.sequence, every.lengths
    if config.moe_capacity_scope == "micro_batch":
        sequence, lengths = torch.zeros_like(sequence), lengths.sum().view(1)
    room = capacities(config, lengths, experts, factor)
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
    if config.moe_token_drop_policy != "position":
        urgency = _urgency(config, layer, choice, tokens, inputs).t().reshape(-1)
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
def _urgency(
    config: RoutingConfig, layer: int, choice: Routing, tokens: Tokens, inputs: LayerInputs
) -> Tensor:
    """The urgency of each choice, float32 [N, k]; the most urgent ones are taken first."""
    if config.moe_token_drop_policy == "probs":
        return tokens.whole(choice.weights.detach())
    keys = inputs.rows.keys
    if keys is None:  # Evaluations drop by the same rule, at random but the same every time.
        keys = torch.zeros_like(tokens.lengths)
    rows = row_keys(keys, tokens, "router", layer, "selection")
    return tokens.whole(hash_uniform(rows.unsqueeze(1), choice.experts))
