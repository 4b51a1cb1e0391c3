"""Rows are what their positions say: computed alone, gathered or shuffled, they come out as among all."""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch

from megazero.config.tree.model import ModelConfig
from megazero.layers.collectives import own_rows
from megazero.layers.initialize import initialize
from megazero.layers.inputs import Attends, LayerInputs, hidden_sites
from megazero.layers.placement import Placement
from megazero.layers.rows import Rows
from megazero.mpu.context import solo_context, thread_context
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.rng import sample_keys, site_key
from megazero.mpu.thread_group import ThreadWorld
from megazero.ops.attention import Documents
from megazero.ops.counter_random import keep_mask
from megazero.ops.dropout import dropout_mask_hidden
from megazero.ops.rotary import rotary_table
from tests.layers.samples import causal_layer
from tests.tables import over_table

S, B, H = 12, 2, 16
CONFIG = ModelConfig(
    num_layers=1,
    hidden_size=H,
    num_attention_heads=4,
    seq_length=S,
    attention_dropout=0.2,
    hidden_dropout=0.2,
)
# Each row is a document of its own, so a row's result depends on no other row.
ALONE = torch.arange(S, dtype=torch.int32).expand(B, -1)
KEYS = torch.from_numpy(sample_keys(5, (3, 4)))


def inputs_of(positions: torch.Tensor) -> LayerInputs:
    """Of the rows at `positions`, [s] or [s, b]."""
    columns = positions.t() if positions.dim() == 2 else positions.expand(B, -1)
    rotary = rotary_table(positions, CONFIG.head_dim, 1e4)
    return LayerInputs(Rows(positions, Documents(ALONE.gather(1, columns)), KEYS, rotary))


def counted(inputs: LayerInputs, count: int) -> LayerInputs:
    """The inputs with positions 0, 1, ... instead."""
    return replace(inputs, rows=replace(inputs.rows, positions=range(count)))


def attention_dropout(placement: Placement, inputs: LayerInputs, layer: int):
    return inputs.attention_dropout(Attends(layer, causal=True, dropout=0.5), 4 * placement.tp.rank)


@over_table(
    "positions",
    [
        torch.tensor([0, 1, 2, 9, 10, 11]),
        torch.tensor([5, 2, 11, 0]),
        torch.tensor([[0, 1], [3, 2], [4, 8], [10, 9], [11, 11]]),
    ],
    ids=["zigzag", "shuffled", "random-LTD"],
)
def test_a_layer_of_some_rows_gives_the_rows_of_all(positions):
    layer = causal_layer(0, CONFIG, Placement.of(solo_context(), torch.float32))
    initialize(layer, 3, solo_context().place)
    x = torch.randn(S, B, H)
    whole, _ = layer(x, inputs_of(torch.arange(S)))
    index = positions if positions.dim() == 2 else positions.unsqueeze(1).expand(-1, B)
    index = index.unsqueeze(-1).expand(-1, -1, H)
    some, _ = layer(x.gather(0, index), inputs_of(positions))
    assert torch.allclose(some, whole.gather(0, index), atol=1e-6)
    elsewhere, _ = layer(x.gather(0, index), counted(inputs_of(positions), len(positions)))
    assert not torch.allclose(some, elsewhere, atol=1e-2), "dropout does depend on the positions"


def test_a_range_is_the_tensor_of_its_numbers():
    layer = causal_layer(0, CONFIG, Placement.of(solo_context(), torch.float32))
    initialize(layer, 3, solo_context().place)
    x = torch.randn(S, B, H)
    inputs = inputs_of(torch.arange(S))
    assert torch.equal(layer(x, inputs)[0], layer(x, counted(inputs, S))[0])


@over_table("positions", [range(S), torch.randperm(S), torch.stack([torch.randperm(S)] * B, 1)])
def test_a_sequence_parallel_rank_drops_in_its_own_rows(positions):
    inputs = LayerInputs(Rows(positions, keys=KEYS))
    whole = inputs.dropout(0.3, site_key("hidden"))
    mask = dropout_mask_hidden(whole, S, B, H)
    world, grid = ThreadWorld(4), ProcessGrid(tp=4)

    def part(rank: int) -> bool:
        context = thread_context(world, grid, rank)
        placement = Placement.of(context, torch.float32, sequence_parallel=True)
        dropout = LayerInputs(replace(inputs.rows, spread=placement.spread)).dropout(0.3, site_key("hidden"))
        return torch.equal(dropout_mask_hidden(dropout, S // 4, B, H), own_rows(mask, context.tp))

    assert world.run(part) == [True] * 4


def test_keys_of_sites_samples_and_seeds_share_nothing():
    """All differ, half of the bits on average, and masks drawn with them are uncorrelated pair by pair."""
    placement = Placement.of(solo_context(), torch.float32)
    sites = [("hidden", layer, half) for layer in range(8) for half in ("attention_out", "mlp_out")]
    keys = []
    for seed in (1, 2):
        inputs = LayerInputs(Rows(range(1), keys=torch.from_numpy(sample_keys(seed, range(16)))))
        keys += [inputs.dropout(0.5, site_key(*site)).own_keys for site in sites]
        keys += [attention_dropout(placement, inputs, layer).keys for layer in range(8)]
    keys = torch.stack(keys).view(-1)  # 2 seeds, 24 sites, 16 samples
    assert len(set(keys.tolist())) == 2 * 24 * 16
    shifts = torch.arange(64)
    bits = ((keys.unsqueeze(1) >> shifts) & 1).double()
    assert (bits.mean(0) - 0.5).abs().max() < 5 * 0.5 / len(keys) ** 0.5
    signs = 2 * bits - 1
    pairs = signs @ signs.t() / 64  # standard deviation 1/8
    pairs = pairs[torch.ones_like(pairs, dtype=torch.bool).triu(1)]
    assert abs(pairs.mean().item()) < 5 / 8 / len(pairs) ** 0.5
    assert 0.97 < (pairs.std() * 8).item() < 1.03
    assert pairs.abs().max() < 7 / 8
    masks = keep_mask(keys.unsqueeze(1), 0.5, torch.arange(2048)).double().mul_(2).sub_(1)
    of_masks = (masks @ masks.t() / 2048)[torch.ones(len(keys), len(keys), dtype=torch.bool).triu(1)]
    assert 0.98 < (of_masks.std() * 2048**0.5).item() < 1.02
    assert of_masks.abs().max() < 6 / 2048**0.5


def test_neighbouring_samples_and_layers_drop_independently():
    """The mean product of the choices of any two of four sites and four samples is what chance gives."""
    inputs = LayerInputs(Rows(range(64), keys=torch.from_numpy(sample_keys(1, range(4)))))
    masks = [
        dropout_mask_hidden(inputs.layer_dropout(0.1, hidden_sites(layer)["mlp_out"]), 64, 4, 512)
        for layer in range(4)
    ]
    rows = torch.stack(masks).permute(0, 2, 1, 3).reshape(16, -1).double()
    centered = (rows - 0.9) / 0.3
    for a, b in itertools.combinations(range(16), 2):
        assert abs((centered[a] * centered[b]).mean().item()) < 5 / centered.shape[1] ** 0.5, (a, b)
