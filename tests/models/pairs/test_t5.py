"""How much a T5 computes: layers again in backward, biases of its own side alone, joined with masks once."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from megazero.config.tree.recompute import RecomputeConfig
from megazero.layers import norm
from megazero.layers.initialize import initialize
from megazero.layers.placement import Placement
from megazero.models.chunk import Slice
from megazero.models.pairs import bias
from megazero.models.pairs.t5 import T5
from megazero.mpu.context import solo_context
from megazero.spec.resolve import model_spec
from tests.models.pairs.hf_t5 import t5_shape
from tests.models.pairs.test_hf_parity import batch_of
from tests.tables import over_table

ENCODER, DECODER = range(2), range(2, 5)


def chunk_of(parts=None, **recompute) -> T5:
    """The parts of T5 1.1 of two and three layers."""
    model, context = t5_shape(), solo_context()
    placement = Placement.of(context, torch.float32)
    chunk = T5(Slice(model_spec(model), (61, 64), placement, RecomputeConfig(**recompute), parts))
    initialize(chunk, 5, context.place)
    return chunk


@over_table(
    ("method", "number", "again"),
    [
        ("block", 1, [0]),
        ("block", 2, [0, 1]),
        ("block", 3, [0, 1, 2]),
        ("block", 5, [0, 1, 2, 3, 4]),
        ("uniform", 2, [0, 1, 2, 3, 4]),
        ("every", 2, [0, 2, 4]),
        ("every", 3, [0, 3]),
    ],
)
def test_a_number_of_layers_to_recompute_is_of_both_stacks_together(method, number, again):
    """Each stack recomputed as many: `block` of 1 was one of the encoder's and one of the decoder's."""
    chunk = chunk_of(granularity="full", method=method, num_layers=number)
    loss = chunk.run(batch_of(t5_shape())).terms["lm"]
    calls: Counter[int] = Counter()
    for layer in (*chunk.encoder, *chunk.decoder):
        layer.register_forward_pre_hook(lambda layer, *_: calls.update([layer.layer]))
    loss.backward()
    assert sorted(calls.elements()) == again
    plain = chunk_of()
    plain.run(batch_of(t5_shape())).terms["lm"].backward()
    for mine, its in zip(chunk.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, its.grad)


@over_table(
    ("parts", "sides"),
    [
        (("embedding", "biases", *ENCODER, "encoder_norm", *DECODER, "head"), [True, False]),
        (("embedding", "biases", *ENCODER), [True]),
        (("biases", "encoder_norm", *DECODER, "head"), [False]),
        (("embedding", "biases"), []),
    ],
    ids=["both", "encoder", "decoder", "neither"],
)
def test_a_stage_computes_the_biases_of_its_own_layers_alone(parts, sides, monkeypatch):
    """Each stage made those of both stacks, and so did each step of a generation."""
    both_ways = []

    def buckets(distances, **how):
        both_ways.append(how["both_ways"])
        return bias_of(distances, **how)

    bias_of = bias.relative_buckets
    monkeypatch.setattr(bias, "relative_buckets", buckets)
    chunk = chunk_of(parts)
    batch = batch_of(t5_shape())
    hidden = None if "embedding" in parts else torch.ones(chunk.input_boundary(batch).shape)
    chunk.run(batch, hidden)
    assert both_ways == sides


@pytest.mark.fast
def test_biases_and_mask_are_joined_once_for_all_layers(monkeypatch):
    """Each layer of the encoder did so, in a tensor of all pairs of rows of its own."""
    chunk, seen = chunk_of(), []
    for layer in (*chunk.encoder, *chunk.decoder):
        layer.register_forward_pre_hook(lambda _, given: seen.append(given[1]))
    batch = batch_of(t5_shape())
    chunk(batch)
    first, second, *decoder = seen
    assert first.mask is second.mask is None
    assert first.bias is second.bias
    b, s = batch.tokens.shape
    assert first.bias.shape == (b, 4, s, s)
    assert (first.bias == -torch.inf).equal((~batch.mask).expand(b, 4, s, s))
    assert all(inputs.mask is batch.mask for inputs in decoder)
    assert all(inputs.bias.shape == (1, 4, 16, 16) for inputs in decoder)


def test_sums_and_norms_are_computed_in_one_pass(monkeypatch):
    """The decoder's layers computed each sum by itself, and then its norm."""
    joint, both = [], norm.add_rms_norm

    def recorded(x, residual, *rest):
        joint.append(residual is not None)
        return both(x, residual, *rest)

    monkeypatch.setattr(norm, "add_rms_norm", recorded)
    chunk = chunk_of()
    chunk(batch_of(t5_shape()))
    assert joint == [False, True] * len(ENCODER) + [False, True, True] * len(DECODER)
