"""The likeliest token, with the vocabulary over any number of ranks, with ties and with padding."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megazero.models.bert import vocab_parallel_argmax, vocab_parallel_hits
from megazero.mpu.context import thread_context
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.thread_group import ThreadWorld
from megazero.ops.cross_entropy import VocabularySlice
from tests.tables import over_table

PADDED = 16


def on_ranks(tp: int, work):
    """The results of ``work(group, first column, columns)`` on each of `tp` ranks."""
    world, width = ThreadWorld(tp), PADDED // tp

    def run(rank: int):
        group = thread_context(world, ProcessGrid(tp=tp), rank).tp
        return work(group, rank * width, slice(rank * width, (rank + 1) * width))

    return world.run(run)


@over_table("tp", [1, 2, 4])
@over_table("dtype", [torch.float64, torch.float32, torch.bfloat16])
@over_table("vocab_size", [1, 3, 13, 16])  # with 3, the later ranks hold nothing but padding
def test_the_first_of_the_highest_wins_on_every_layout(tp, dtype, vocab_size):
    rng = np.random.default_rng(vocab_size)
    logits = rng.integers(-3, 0, (40, 1, PADDED))  # few values: most rows have ties, within ranks and across
    expected = logits[..., :vocab_size].argmax(-1)  # numpy takes the first
    logits[..., vocab_size:] = 100
    tensor = torch.from_numpy(logits).to(dtype)

    def work(group, start, columns):
        return vocab_parallel_argmax(tensor[..., columns], VocabularySlice(group, start, vocab_size))

    for found in on_ranks(tp, work):
        assert found.dtype == torch.int64
        assert found.tolist() == expected.tolist()


@over_table("tp", [1, 2, 4])
def test_hits_are_targets_with_the_highest_logit(tp):
    logits = torch.zeros(4, 1, PADDED)
    for row, best in enumerate((0, 7, 12, 12)):
        logits[row, 0, best] = 1.0
    target = torch.tensor([[0], [7], [11], [12]])

    def work(group, start, columns):
        return vocab_parallel_hits(logits[..., columns], target, VocabularySlice(group, start, 13))

    assert [(found.dtype, found.shape, found.item()) for found in on_ranks(tp, work)] == [
        (torch.float32, torch.Size([]), 3.0)
    ] * tp


@pytest.mark.parametrize("tp", [1, 2])
def test_of_no_targets_none_hits(tp):
    def work(group, start, columns):
        return vocab_parallel_hits(
            torch.zeros(0, 1, PADDED // tp),
            torch.zeros(0, 1, dtype=torch.long),
            VocabularySlice(group, start, 13),
        )

    assert [found.item() for found in on_ranks(tp, work)] == [0.0] * tp
