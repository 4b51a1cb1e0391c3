"""Small routers, tokens and experts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain

import torch
from torch import Tensor, nn

from megazero.config.tree.model import ModelConfig
from megazero.layers.initialize import initialize
from megazero.layers.inputs import LayerInputs
from megazero.layers.placement import Placement
from megazero.layers.rows import Rows
from megazero.moe.router import Router, Routing, router_weight
from megazero.moe.tokens import Tokens
from megazero.mpu.context import ParallelContext, solo_context, thread_context
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.group import Group
from megazero.mpu.rng import sample_keys
from megazero.mpu.solo_group import SoloGroup
from megazero.mpu.thread_group import ThreadWorld
from megazero.spec.resolve import model_spec, router_spec

SEED = 7


def config(**own) -> ModelConfig:
    """A model with four experts in each layer, unless told otherwise."""
    shape = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 1, "seq_length": 16}
    return ModelConfig(**{**shape, "num_experts": (4,), **own})


def on_ranks(work: Callable[[ParallelContext], object], ranks: int = 1, **sizes: int) -> list:
    """``work(context)`` on each rank of a grid, whose data parallelism takes what the sizes leave."""
    if ranks == 1:
        return [work(solo_context())]
    world, grid = ThreadWorld(ranks, 20.0), ProcessGrid.factor(ranks, **sizes)
    return world.run(lambda rank: work(thread_context(world, grid, rank)))


def randn(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Normal numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def built(module: nn.Module, placement: Placement) -> nn.Module:
    """The module with its initial weights, and with biases that are not zero."""
    initialize(module, SEED, placement.place)
    for number, parameter in enumerate(module.parameters()):
        if parameter.spec.init.kind == "zeros":
            whole = randn(100 + number, *parameter.spec.shape).to(parameter.dtype) * 0.3
            with torch.no_grad():
                parameter.copy_(parameter.spec.shard(whole, placement.place))
    return module


def tokens(lengths: Sequence[int], columns: int | None = None, group: Group | None = None) -> Tokens:
    """All tokens of sequences of these lengths, or a member's share; `columns` pads them to so many."""
    b, columns = len(lengths), columns or max(lengths)
    number = torch.arange(columns * b)
    sequence, position = number % b, number // b
    lengths = torch.tensor(lengths)
    real = position < lengths[sequence]
    if bool(real.all()):
        real = None
    group = group or SoloGroup()
    whole = Tokens(number, sequence, position, real, lengths, group, group)
    own = None if real is None else whole.own(real)
    mine = map(whole.own, (number, sequence, position))
    return Tokens(*mine, own, lengths, group, group)


def laid_out(by_sequence: Sequence[Sequence], columns: int | None = None, blank=0) -> list:
    """A list for each sequence -> one list in the order of `tokens`, with `blank` where there is no token."""
    columns = columns or max(map(len, by_sequence))
    padded = [[*each, *[blank] * (columns - len(each))] for each in by_sequence]
    return [*chain.from_iterable(zip(*padded, strict=True))]


def joined(lists: Iterable[Sequence]) -> list:
    """All lists, one after the other."""
    return [*chain.from_iterable(lists)]


def inputs(samples: Sequence[int] | None = (), columns: int = 16, seed: int = SEED) -> LayerInputs:
    """Those of a training on these samples; of an evaluation if there are none."""
    keys = torch.from_numpy(sample_keys(seed, samples)) if samples else None
    return LayerInputs(Rows(range(columns), keys=keys))


def route(
    table: Tensor | Sequence[Sequence[float]],
    own: Tokens | None = None,
    given: LayerInputs | None = None,
    *,
    layer: int = 0,
    bias: Sequence[float] | None = None,
    **settings,
) -> Routing:
    """What a router chooses whose logits are this table: its weight is the identity."""
    table = torch.as_tensor(table, dtype=torch.float32)
    n, experts = table.shape
    model = config(hidden_size=experts, num_experts=(experts,), **settings)
    weight = router_weight(
        layer, experts, model_spec(model).stream, Placement.of(solo_context(), torch.float32)
    )
    router = Router(layer, weight, router_spec(model))
    with torch.no_grad():
        router.weight.copy_(torch.eye(experts))
    if bias is not None:
        router.bias = torch.tensor(bias)
    return router(table, own or tokens([n]), given or inputs())


def choice(experts: Sequence, weights: Sequence | None = None, total: int = 2) -> Routing:
    """A choice of these experts [n, k] of `total`, whose probabilities are all the same."""
    chosen = torch.tensor(experts)
    chosen = chosen.unsqueeze(1) if chosen.dim() == 1 else chosen
    even = torch.full((len(chosen), total), 1 / total)
    given = torch.ones(chosen.shape) if weights is None else torch.tensor(weights).view(chosen.shape)
    return Routing(chosen, given, even, even.log())
