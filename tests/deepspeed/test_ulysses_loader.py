"""The loader of shared sequences: each sample once, in pieces whose labels were shifted before the cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from megazero.deepspeed.sequence.loader import UlyssesSPDataLoaderAdapter
from megazero.errors import DataError

LENGTHS = (8, 4, 12, 8)


def samples() -> list[dict[str, Any]]:
    """Of several lengths; each has a name, features and a mask beside its tokens."""
    return [
        {
            "input_ids": 100 * number + torch.arange(length),
            "position_ids": torch.arange(length),
            "labels": 100 * number + torch.arange(length),
            "attention_mask": torch.ones(length, dtype=torch.bool),
            "features": torch.arange(2.0 * length, dtype=torch.bfloat16).view(length, 2),
            "name": str(number),
        }
        for number, length in enumerate(LENGTHS)
    ]


def adapter(rank: int, size: int, data: list[dict[str, Any]], shared_out: bool = True) -> Any:
    sampler = DistributedSampler(data, size, rank, shuffle=False) if shared_out else None
    return UlyssesSPDataLoaderAdapter(DataLoader(data, sampler=sampler), rank, None, size, "cpu")


def _pieces(rank: int, size: int) -> list[list[dict[str, Any]]]:
    loader = adapter(rank, size, samples())
    assert len(loader) == len(LENGTHS)
    return [list(loader), list(loader)]  # a second epoch


def joined(pieces: tuple[dict[str, Any], ...], key: str) -> Tensor:
    return torch.cat([piece[key] for piece in pieces], 1)


def test_each_sample_comes_once_an_epoch_and_is_cut_after_the_shift(pool):
    ranks = pool.run(_pieces, 2)
    for epoch in range(2):
        seen = {}
        for pieces in zip(*(rank[epoch] for rank in ranks), strict=True):
            assert pieces[0].keys() == {*samples()[0], "shift_labels"} - {"labels"}
            assert pieces[0]["name"] == pieces[1]["name"]
            assert pieces[0]["input_ids"].shape == pieces[1]["input_ids"].shape
            seen[int(pieces[0]["name"][0])] = pieces
        assert sorted(seen) == list(range(len(LENGTHS)))
        for number, sample in enumerate(samples()):
            for key in ("input_ids", "position_ids", "attention_mask", "features"):
                assert torch.equal(joined(seen[number], key)[0], sample[key])
            labels = joined(seen[number], "shift_labels")[0]
            assert labels.tolist() == [*sample["labels"][1:].tolist(), -100]


def _problem(rank: int, size: int, kind: str) -> str:
    data = samples()
    if kind == "length":
        data[1] = {key: value[:3] for key, value in data[1].items()}
    elif kind == "columns":
        data[1]["labels"] = data[1]["labels"][:2]
    elif kind == "missing":
        del data[1]["position_ids"]
    loader = adapter(rank, size, data)
    if kind == "ends":
        loader.dl = loader.dl if rank == 0 else DataLoader(data[:1])
        loader.iter = iter(loader.dl)
    with pytest.raises(DataError) as error:
        list(loader)
    return str(error.value)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("length", "`input_ids` must have a multiple of 2 columns"),
        ("columns", "`labels` must have the shape of `input_ids` [1, 4] first, but has [1, 2]"),
        ("missing", "`position_ids` must be a tensor in each batch of `dl`, but is NoneType"),
        (
            "ends",
            "`dl` must give equally many batches to the 2 ranks that share a sequence, but ends first on 1",
        ),
    ],
)
def test_a_batch_that_does_not_fit_is_refused_on_all_ranks(pool, kind, words):
    """One rank's alone would leave the others waiting."""
    first, second = pool.run(_problem, 2, kind)
    assert first == second
    assert first.startswith(words)


def _copies(rank: int, size: int) -> int:
    with pytest.warns(UserWarning, match="2 ranks that share a sequence have loaded the same samples"):
        return len(list(adapter(rank, size, samples(), shared_out=False)))


def test_a_loader_that_gives_all_ranks_the_same_is_warned_of(pool):
    assert pool.run(_copies, 2) == [2 * len(LENGTHS)] * 2
