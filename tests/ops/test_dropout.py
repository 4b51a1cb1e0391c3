"""Dropout masks are functions of the whole: rows, heads and sequences keep theirs wherever they are."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megazero.ops import native
from megazero.ops.bias_dropout_add import BIAS_DROPOUT_ADD, bias_dropout_add
from megazero.ops.counter_random import derive
from megazero.ops.dropout import AttentionDropout, Dropout, dropout_mask_attention, dropout_mask_hidden
from tests.tables import over_table

WHOLE = Dropout(0.3, torch.tensor([5, 6, -7]), range(12))
# Another choice of rows for each sequence.
BY_SAMPLE = torch.tensor([[0, 2, 1], [3, 5, 4], [11, 6, 9]])
ROWS = {
    "a range": range(12),
    "a shard": range(8, 12),
    "every third": range(1, 12, 3),
    "a permutation": torch.tensor([7, 3, 0, 11, 1, 2, 4, 5, 6, 8, 9, 10]),
    "a zigzag half": torch.tensor([0, 1, 2, 9, 10, 11]),
    "a choice per sequence": BY_SAMPLE,
}
each_rows = over_table("rows", ROWS.values(), ids=ROWS.keys())


def pick(x: torch.Tensor, rows: range | torch.Tensor) -> torch.Tensor:
    """Rows of x [s, b, ...]."""
    index = torch.tensor(list(rows)) if isinstance(rows, range) else rows
    if index.dim() == 1:
        return x[index]
    return torch.stack([x[index[:, i], i] for i in range(x.shape[1])], 1)


def test_a_site_is_mixed_into_the_keys():
    """As if its own keys had been derived before."""
    drawn = dropout_mask_hidden(Dropout(0.3, WHOLE.keys, WHOLE.positions, 77), 12, 3, 40)
    derived = dropout_mask_hidden(Dropout(0.3, derive(77, WHOLE.keys), WHOLE.positions), 12, 3, 40)
    assert torch.equal(drawn, derived)
    assert not torch.equal(drawn, dropout_mask_hidden(WHOLE, 12, 3, 40))


@each_rows
def test_rows_keep_their_masks(rows) -> None:
    whole = dropout_mask_hidden(WHOLE, 12, 3, 20)
    assert torch.equal(
        dropout_mask_hidden(replace(WHOLE, positions=rows), len(rows), 3, 20), pick(whole, rows)
    )


@each_rows
def test_bias_dropout_add_of_some_rows_gives_the_rows_of_all(rows) -> None:
    x, bias, residual = torch.randn(12, 3, 20), torch.randn(20), torch.randn(12, 3, 20)
    x.requires_grad_()
    out = bias_dropout_add(x, bias, residual, WHOLE)
    ours = bias_dropout_add(pick(x, rows), bias, pick(residual, rows), replace(WHOLE, positions=rows))
    assert torch.equal(ours, pick(out, rows))
    grad = torch.randn(ours.shape)
    grads = [torch.autograd.grad(part, x, grad)[0] for part in (ours, pick(out, rows))]
    assert torch.equal(*grads)


@each_rows
def test_queries_and_keys_keep_their_masks(rows) -> None:
    whole = AttentionDropout(0.3, WHOLE.keys, range(12), range(12))
    mask = dropout_mask_attention(whole, 3, 4, 12, 12)
    some_queries = dropout_mask_attention(replace(whole, query_positions=rows), 3, 4, len(rows), 12)
    some_keys = dropout_mask_attention(replace(whole, key_positions=rows), 3, 4, 12, len(rows))
    by_query, by_key = mask.permute(2, 0, 1, 3), mask.permute(3, 0, 1, 2)
    assert torch.equal(some_queries, pick(by_query, rows).permute(1, 2, 0, 3))
    assert torch.equal(some_keys, pick(by_key, rows).permute(1, 2, 3, 0))
    assert 0.6 < mask.float().mean() < 0.8


def test_a_ranks_heads_are_theirs_in_the_whole() -> None:
    dropout = AttentionDropout(0.3, WHOLE.keys, range(5), range(7))
    whole = dropout_mask_attention(dropout, 3, 8, 5, 7)
    assert torch.equal(dropout_mask_attention(replace(dropout, head_offset=6), 3, 2, 5, 7), whole[:, 6:])


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


def test_keys_must_be_one_per_sequence_and_positions_one_per_row() -> None:
    with pytest.raises(
        ValueError, match=r"one key per sequence \(4\) or per row \(12, 4\), but has shape \(3,\)"
    ):
        bias_dropout_add(torch.ones(12, 4, 5), None, torch.ones(12, 4, 5), WHOLE)
    with pytest.raises(ValueError, match=r"one key per sequence \(4\)"):
        dropout_mask_hidden(WHOLE, 12, 4, 5)
    with pytest.raises(ValueError, match=r"`positions` must be \[2\] or \[2, 3\], but has shape \[12\]"):
        bias_dropout_add(torch.ones(2, 3, 5), None, torch.ones(2, 3, 5), WHOLE)
    with pytest.raises(ValueError, match=r"`positions` must be \[3\] or \[3, 2\], but has shape \[3, 3\]"):
        dropout_mask_hidden(Dropout(0.3, WHOLE.keys[:2], BY_SAMPLE), 3, 2, 5)
    attention = AttentionDropout(0.3, WHOLE.keys, range(5), range(7))
    with pytest.raises(ValueError, match=r"`key_positions` must be \[5\] or \[5, 3\], but has shape \[7\]"):
        dropout_mask_attention(attention, 3, 4, 5, 5)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Dropout(1.0, WHOLE.keys, range(1)),
        lambda: AttentionDropout(1.0, WHOLE.keys, range(1), range(1)),
    ],
)
def test_share_must_be_below_one(make) -> None:
    with pytest.raises(ValueError, match=r"but is 1\.0"):
        make()


@pytest.mark.parametrize("name", ["chunked", "native_cpu", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_implementation_drops_the_same_elements(name: str, dtype: torch.dtype) -> None:
    """At any width and any number of rows, none among them; backward drops what forward does."""
    if name == "native_cpu" and not native.available():
        pytest.skip("the compiled kernels are not built")
    rows = {each.name: each.fn for each in BIAS_DROPOUT_ADD.implementations}
    for s, h in ((0, 5), *((1 + h % 5, h) for h in range(1, 71)), (7, 1023), (2, 1025), (2, 4097)):
        dropout = Dropout(0.3, torch.tensor([5, -2]), range(3, 3 + s))
        x = torch.ones(s, 2, h, dtype=dtype, requires_grad=True)
        bias = torch.zeros(h, dtype=dtype, requires_grad=True)
        out = rows[name](x, bias, torch.zeros(s, 2, h, dtype=dtype), dropout)
        kept = dropout_mask_hidden(dropout, s, 2, h)
        assert torch.equal(out != 0, kept)
        grad_x, grad_bias = torch.autograd.grad(out, (x, bias), torch.ones_like(out))
        assert torch.equal(grad_x != 0, kept)
        assert torch.allclose(grad_bias.float(), kept.sum((0, 1)) / 0.7, rtol=1e-2)
