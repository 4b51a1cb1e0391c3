"""Tokens that layers do not see, and layers that do not run, against loops over samples."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import pytest
import torch

from megazero.config.tree.model import ModelConfig
from megazero.layers.initialize import initialize
from megazero.layers.inputs import LayerInputs, Skipping
from megazero.layers.placement import Placement
from megazero.layers.recompute import run_layers
from megazero.layers.rows import Rows
from megazero.layers.skipping import kept_columns, run_layer
from megazero.layers.sums import Sums
from megazero.mpu.context import solo_context
from megazero.mpu.rng import sample_keys, site_key
from megazero.ops.attention import Documents
from megazero.ops.rotary import rotary_table
from tests.layers.samples import causal_layer
from tests.ops.scalar_random import derive_reference
from tests.tables import over_table

S, B, H, KEPT = 9, 3, 16, 4
CONFIG = ModelConfig(
    num_layers=4,
    hidden_size=H,
    num_attention_heads=4,
    seq_length=S,
    attention_dropout=0.0,
    hidden_dropout=0.0,
)
KEYS = torch.from_numpy(sample_keys(5, range(B)))


def signed(bits: int) -> int:
    """The int64 with these 64 bits."""
    return bits - (1 << 64) if bits >> 63 else bits


def make_layer(number: int = 1, **changes):
    config = CONFIG.model_copy(update=changes)
    context = solo_context()
    layer = causal_layer(number, config, Placement.of(context, torch.float64))
    initialize(layer, 3, context.place)
    return layer


def make_x() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(S, B, H, dtype=torch.float64, generator=generator, requires_grad=True)


def make_inputs(kept: int | None = KEPT, scales=None, wanted=None, keys=KEYS, **rows) -> LayerInputs:
    skipping = Skipping(kept, (1,), scales)
    return LayerInputs(Rows(range(S), keys=keys, **rows), wanted=wanted, skipping=skipping)


class TestKeptColumns:
    def test_ascending_distinct_and_a_function_of_key_and_layer(self):
        columns = kept_columns(KEYS, 1, S, KEPT)
        assert columns.shape == (KEPT, B)
        assert bool((columns.diff(dim=0) > 0).all())
        assert set(columns.flatten().tolist()) <= set(range(S))
        assert kept_columns(KEYS[1:], 1, S, KEPT).equal(columns[:, 1:])
        assert not kept_columns(KEYS, 2, S, KEPT).equal(columns)

    def test_the_choice_stays_what_it_is(self):
        """A run resumed with another version must drop the same tokens: the four with the least numbers."""
        site = site_key("kept", 1)
        expected = []
        for key in KEYS.tolist():
            own = derive_reference(site, key)
            order = [signed(derive_reference(own, column)) >> 4 for column in range(S)]
            expected.append(sorted(sorted(range(S), key=order.__getitem__)[:KEPT]))
        assert kept_columns(KEYS, 1, S, KEPT).t().tolist() == expected

    def test_samples_of_a_batch_keep_different_tokens(self):
        columns = kept_columns(torch.from_numpy(sample_keys(1, range(50))), 0, 64, 8)
        assert len({tuple(c) for c in columns.t().tolist()}) == 50

    def test_all_sets_are_equally_likely(self):
        """Chi-squared over the 20 sets of 3 of 6 tokens: below the 99.99 % quantile of 19 degrees, 51.6."""
        keys = torch.from_numpy(sample_keys(2, range(20_000)))
        found = Counter(map(tuple, kept_columns(keys, 0, 6, 3).t().tolist()))
        assert set(found) == set(itertools.combinations(range(6), 3))
        assert sum((n - 1000) ** 2 / 1000 for n in found.values()) < 51.6

    @pytest.mark.parametrize(("length", "kept"), [(1, 1), (2, 1), (7, 7), (513, 3)])
    def test_edges(self, length, kept):
        columns = kept_columns(KEYS, 0, length, kept)
        assert columns.shape == (kept, B)
        if kept == length:
            assert columns.t().tolist() == [list(range(length))] * B


def by_sample(layer, x: torch.Tensor, columns: torch.Tensor, inputs_of) -> torch.Tensor:
    """Random-LTD one sample at a time: run the layer on the kept rows, and put them back."""
    results = []
    for b in range(B):
        rows = columns[:, b]
        out, _ = layer(x[rows, b : b + 1], inputs_of(b, rows))
        results.append(x[:, b].index_copy(0, rows, out[:, 0]))
    return torch.stack(results, 1)


@over_table("positions", ["learned", "rope", "documents"])
def test_equals_a_loop_over_samples(positions):
    changes = {"position_embedding_type": "rope"} if positions == "rope" else {}
    layer, x = make_layer(**changes), make_x()
    table = rotary_table(torch.arange(S), H // 4, 1e4, torch.float64) if positions == "rope" else None
    documents = None
    if positions == "documents":
        ids = torch.tensor([[0] * 4 + [1] * 5, [0] * 9, [0, 0, 1, 1, 1, 2, 2, 2, 2]], dtype=torch.int32)
        documents = Documents(ids)
    inputs = make_inputs(rotary=table, documents=documents)
    columns = kept_columns(KEYS, 1, S, KEPT)

    def inputs_of(b: int, rows: torch.Tensor) -> LayerInputs:
        own_documents = None if documents is None else Documents(documents.ids[b : b + 1, rows])
        rotary = None if table is None else (table[0][rows], table[1][rows])
        return LayerInputs(Rows(rows, own_documents, KEYS[b : b + 1], rotary))

    (got, _), expected = run_layer(layer, x, inputs), by_sample(layer, x, columns, inputs_of)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    weights = [x, *layer.parameters()]
    grad = torch.randn(got.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    ours, theirs = (torch.autograd.grad(y, weights, grad, retain_graph=True) for y in (got, expected))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    untouched = torch.ones(S, B, dtype=torch.bool).scatter_(0, columns, False)
    assert got[untouched].equal(x[untouched])
    assert not torch.isclose(got[~untouched], x[~untouched]).any()


def test_dropout_of_kept_tokens_is_what_they_have_among_all():
    layer, x = make_layer(hidden_dropout=0.5), make_x()
    some, _ = run_layer(layer, x, make_inputs())
    all_kept = replace(make_inputs(kept=None), skipping=Skipping(S, (1,)))
    whole, _ = run_layer(layer, x, all_kept)
    columns = kept_columns(KEYS, 1, S, KEPT)
    # A first token that is kept attends to nothing else in either, and so has the same result.
    first = [b for b in range(B) if columns[0, b] == 0]
    assert first
    for b in first:
        torch.testing.assert_close(some[0, b], whole[0, b])


def test_other_layers_and_evaluations_see_all():
    x = make_x()
    for layer, inputs in ((make_layer(2), make_inputs()), (make_layer(1), make_inputs(kept=None))):
        got, _ = run_layer(layer, x, inputs)
        assert got.equal(layer(x, LayerInputs(Rows(range(S), keys=KEYS)))[0])


def test_a_layer_left_out_passes_its_input_on():
    x = make_x()
    got, sums = run_layer(make_layer(1), x, make_inputs(kept=None, scales=(1.0, 0.0, 1.0, 1.0)))
    assert got is x
    assert sums == Sums()


def test_what_a_layer_adds_is_scaled():
    """Both branches, and what the second sees of the first (Zhang & He 2020, algorithm 1)."""
    layer, x = make_layer(1), make_x()
    got, _ = run_layer(layer, x, make_inputs(kept=None, scales=(1.0, 2.0, 1.0, 1.0)))
    inputs = LayerInputs(Rows(range(S), keys=KEYS))
    out, bias = layer.attention(layer.input_norm(x), inputs)
    middle = x + 2 * out + (0 if bias is None else 2 * bias)
    out, bias, _ = layer.mlp(layer.mlp_norm(middle), inputs)
    torch.testing.assert_close(got, middle + 2 * out + (0 if bias is None else 2 * bias))


def test_wanted_rows_of_a_last_layer_that_drops_tokens():
    layer, x = make_layer(1), make_x()
    wanted = torch.tensor([[0, 3, 8], [5, 4, 2]])
    whole, _ = run_layer(layer, x, make_inputs())
    got, _ = run_layer(layer, x, make_inputs(wanted=wanted))
    assert got.equal(whole[wanted, torch.arange(B)])


def test_sums_over_tokens_stand_for_all_of_them():
    class Counting(torch.nn.Module):
        layer, placement = 1, Placement.of(solo_context(), torch.float64)

        def forward(self, x, inputs):
            seen = torch.tensor(float(x.shape[0] * x.shape[1]))
            return x, Sums({"z": seen, "sequences": seen})

    _, sums = run_layers(
        [Counting()], make_x(), make_inputs(), [(range(1), False)], per_token=frozenset({"z"})
    )
    assert (sums.terms["z"].item(), sums.terms["sequences"].item()) == (S * B, KEPT * B)


def test_on_the_meta_device():
    layer = causal_layer(1, CONFIG, Placement.of(solo_context(torch.device("meta")), torch.float32))
    inputs = make_inputs(keys=KEYS.to("meta"))
    out, _ = run_layer(layer, torch.empty(S, B, H, device="meta"), inputs)
    assert (out.shape, out.device.type) == ((S, B, H), "meta")
