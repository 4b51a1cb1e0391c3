"""Dropout of packed BERT samples goes by the sample: neither its neighbours nor the micro-batch count."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megazero.layers.inputs import Attends, LayerInputs, hidden_sites
from megazero.layers.rows import Rows
from megazero.mpu.rng import sample_keys
from megazero.ops.dropout import AttentionDropout, Dropout, dropout_mask_attention, dropout_mask_hidden
from megazero.verify.compare import compare
from megazero.verify.record import Record
from megazero.verify.run import run_alone, run_in_threads
from tests.layouts.layout import Layout

HIDDEN, HEADS = 16, 3
KEYS = torch.as_tensor(sample_keys(7, (4, 5)))
# Samples 4 and 5, of six and three tokens, in one row of ten columns, 5 first.
PACKED_KEYS = torch.cat([KEYS[1].repeat(3), KEYS[0].repeat(6), KEYS[0].repeat(1)]).unsqueeze(1)
PLACES = torch.tensor([0, 1, 2, 0, 1, 2, 3, 4, 5, 0]).unsqueeze(1)


def test_a_packed_sample_has_the_masks_that_it_has_alone():
    packed = dropout_mask_hidden(Dropout(0.4, PACKED_KEYS, PLACES), 10, 1, HIDDEN)
    alone = dropout_mask_hidden(Dropout(0.4, KEYS, range(6)), 6, 2, HIDDEN)
    assert packed[:3, 0].equal(alone[:3, 1])
    assert packed[3:9, 0].equal(alone[:, 0])
    probabilities = dropout_mask_attention(
        AttentionDropout(0.4, PACKED_KEYS, PLACES, PLACES), 1, HEADS, 10, 10
    )
    wanted = dropout_mask_attention(AttentionDropout(0.4, KEYS, range(6), range(6)), 2, HEADS, 6, 6)
    assert probabilities[0, :, :3, :3].equal(wanted[1, :, :3, :3])
    assert probabilities[0, :, 3:9, 3:9].equal(wanted[0])


def test_wanted_rows_and_slices_keep_their_masks():
    inputs = LayerInputs(Rows(PLACES, keys=PACKED_KEYS))
    attends = Attends(1, False, 0.4)
    whole = inputs.layer_dropout(0.4, hidden_sites(1)["mlp_out"])
    mask = dropout_mask_hidden(whole, 10, 1, HIDDEN)
    wanted = torch.tensor([[0], [4], [8]])
    narrow = replace(inputs, wanted=wanted).narrowed().layer_dropout(0.4, hidden_sites(1)["mlp_out"])
    assert dropout_mask_hidden(narrow, 3, 1, HIDDEN).equal(mask[wanted[:, 0]])
    queries = replace(inputs, wanted=wanted).attention_dropout(attends, first=0)
    every = inputs.attention_dropout(attends, first=0)
    assert dropout_mask_attention(queries, 1, HEADS, 3, 10).equal(
        dropout_mask_attention(every, 1, HEADS, 10, 10)[:, :, wanted[:, 0]]
    )


@pytest.mark.parametrize("micro_batch", [2, 4, 8])
def test_the_loss_does_not_depend_on_the_micro_batch(micro_batch):
    """It was 5.313270 with one sample in a micro-batch and 5.311511 with four."""
    layout = Layout(shape="bert", packed=True, dropout=0.1)
    assert_equal([run_alone(replace(layout, micro_batch=micro_batch).config())], layout)
    assert_equal([run_alone(replace(layout, packed=False).config())], layout)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(shape="bert", packed=True, dropout=0.1, tp=2, sequence_parallel=True, micro_batch=4),
        Layout(shape="bert-original", packed=True, dropout=0.1, tp=2, pp=2, micro_batch=2, recompute="full"),
        Layout(shape="bert", packed=True, dropout=0.1, dp=2, zero=3, micro_batch=2, recompute="selective"),
    ],
    ids=lambda layout: layout.name,
)
def test_layouts_drop_the_same(layout):
    assert_equal(run_in_threads(layout.config(), layout.grid), Layout(shape=layout.shape, dropout=0.1))


def assert_equal(records: list[Record], alone: Layout) -> None:
    """Equal to one process with one sample in each micro-batch, to rounding."""
    wanted = run_alone(replace(alone, packed=True, micro_batch=1).config())
    bad = [str(deviation) for deviation in compare(records, wanted) if deviation.share > 1]
    assert not bad, "\n".join(bad)
