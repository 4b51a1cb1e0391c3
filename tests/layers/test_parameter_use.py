"""Blocks touch their parameters only while they run: ZeRO stage 3 frees them at all other times."""

from __future__ import annotations

import torch
from torch import nn

from megazero.config.tree.model import ModelConfig
from megazero.config.tree.recompute import RecomputeConfig
from megazero.layers.embedding import Embedding
from megazero.layers.initialize import initialize
from megazero.layers.inputs import LayerInputs
from megazero.layers.placement import Placement
from megazero.layers.recompute import recompute_units, run_layers
from megazero.layers.rows import Rows
from megazero.mpu.context import thread_context
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.thread_group import ThreadWorld
from megazero.spec.resolve import model_spec
from tests.layers.samples import causal_layer
from tests.tables import over_table

CONFIG = ModelConfig(num_layers=3, hidden_size=16, num_attention_heads=4, seq_length=8)


def bring_and_take_away(block: nn.Module, *, backward: bool) -> None:
    """From now on the parameters of `block` are NaN, except during its forward and backward."""
    values = [parameter.detach().clone() for parameter in block.parameters()]

    def bring(*_) -> None:
        for parameter, value in zip(block.parameters(), values, strict=True):
            parameter.data.copy_(value)

    def take_away(*_) -> None:
        for parameter in block.parameters():
            parameter.data.fill_(float("nan"))

    block.register_forward_pre_hook(bring)
    block.register_forward_hook(take_away)
    if backward:
        block.register_full_backward_pre_hook(bring)
        block.register_full_backward_hook(take_away)
    take_away()


def gradients(context, recompute: RecomputeConfig, sequence_parallel: bool, split: bool, away: bool):
    """All gradients of one pass, and how many weights came back from weight halves."""
    placement = Placement.of(context, torch.float32, sequence_parallel=sequence_parallel)
    selective = recompute.granularity == "selective"
    embedding = Embedding(model_spec(CONFIG).embedding, (12, 12), placement)
    layers = nn.ModuleList(
        causal_layer(i, CONFIG, placement, selective=selective) for i in range(CONFIG.num_layers)
    )
    model = nn.ModuleList([embedding, layers])
    initialize(model, 3, context.place)
    if away:
        # The gradient of a look-up needs no weight.
        bring_and_take_away(embedding, backward=False)
        for layer in layers:
            bring_and_take_away(layer, backward=True)
    deferred = [] if split else None
    inputs = LayerInputs(Rows(range(8), spread=placement.spread), deferred=deferred)
    tokens = torch.arange(16).view(2, 8) % 12
    x = embedding(tokens, torch.arange(8), inputs)
    x, _ = run_layers(layers, x, inputs, recompute_units(CONFIG.num_layers, recompute))
    (x**2).sum().backward()
    assert all(parameter.isnan().all() for parameter in model.parameters()) is away
    weights = {id(half()) for half in deferred or ()}
    return [parameter.grad for parameter in model.parameters()], len(weights)


@over_table("split", [False, True])
@over_table("sequence_parallel", [False, True])
@over_table(
    "recompute",
    [
        RecomputeConfig(),
        RecomputeConfig(granularity="selective"),
        RecomputeConfig(granularity="full"),
        RecomputeConfig(granularity="full", num_layers=2),
    ],
    ids=lambda r: f"{r.granularity}-{r.num_layers}",
)
def test_parameters_may_be_away_between_uses(recompute, sequence_parallel, split):
    world, grid = ThreadWorld(2), ProcessGrid(tp=2)

    def run(away: bool) -> list:
        return world.run(
            lambda rank: gradients(
                thread_context(world, grid, rank), recompute, sequence_parallel, split, away
            )
        )

    for (grads, weights), (expected, _) in zip(run(True), run(False), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(grads, expected, strict=True))
        assert weights == (4 * CONFIG.num_layers if split else 0)
