"""Dropout masks are functions of the whole: shards are slices, keys are sequences."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megazero.ops.bias_dropout_add import bias_dropout_add
from megazero.ops.dropout import Dropout, dropout_mask_attention, dropout_mask_hidden

WHOLE = Dropout(0.3, torch.tensor([5, 6, -7]))


def test_a_sequence_shard_is_the_slice_of_the_whole() -> None:
    whole = dropout_mask_hidden(WHOLE, 12, 3, 20)
    assert torch.equal(dropout_mask_hidden(replace(WHOLE, offset=8), 4, 3, 20), whole[8:])
    x, residual = torch.randn(12, 3, 20), torch.randn(12, 3, 20)
    out = bias_dropout_add(x, None, residual, WHOLE)
    shard = bias_dropout_add(x[8:], None, residual[8:], replace(WHOLE, offset=8))
    assert torch.equal(shard, out[8:])


def test_a_ranks_heads_are_theirs_in_the_whole() -> None:
    whole = dropout_mask_attention(WHOLE, 3, 8, 5, 7)
    assert torch.equal(dropout_mask_attention(replace(WHOLE, head_offset=6), 3, 2, 5, 7), whole[:, 6:])


def test_a_sequence_keeps_its_mask_in_any_micro_batch() -> None:
    whole = dropout_mask_hidden(WHOLE, 12, 3, 20)
    alone = dropout_mask_hidden(replace(WHOLE, keys=WHOLE.keys[1:2]), 12, 1, 20)
    assert torch.equal(alone, whole[:, 1:2])
    assert not torch.equal(whole[:, 0], whole[:, 1])


def test_the_mask_is_what_bias_dropout_add_applies() -> None:
    out = bias_dropout_add(torch.ones(12, 3, 20), None, torch.zeros(12, 3, 20), WHOLE)
    kept = dropout_mask_hidden(WHOLE, 12, 3, 20)
    assert torch.equal(out != 0, kept)
    assert torch.allclose(out[kept], torch.tensor(1 / 0.7))


def test_keys_must_be_one_per_sequence() -> None:
    with pytest.raises(ValueError, match=r"one key per sequence \(4\), but has shape \(3,\)"):
        bias_dropout_add(torch.ones(2, 4, 5), None, torch.ones(2, 4, 5), WHOLE)
    with pytest.raises(ValueError, match=r"one key per sequence \(4\)"):
        dropout_mask_hidden(WHOLE, 2, 4, 5)


def test_share_must_be_below_one() -> None:
    with pytest.raises(ValueError, match=r"but is 1\.0"):
        Dropout(1.0, torch.zeros(1, dtype=torch.int64))
