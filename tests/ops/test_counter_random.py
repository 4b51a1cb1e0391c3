"""Counter-based randomness: published vectors, the Python twins, blocks of a whole, statistics."""

from __future__ import annotations

import itertools

import pytest
import torch

from megazero.ops import counter_random
from megazero.ops.counter_random import (
    derive,
    drawn_at_once,
    hash_uniform,
    keep_mask,
    normal,
    normal_block,
)
from tests.ops.scalar_random import (
    derive_reference,
    keep_reference,
    splitmix_64,
    splitmix_64_stream,
    uniform_reference,
)
from tests.tables import over_table

KEYS = (0, 1, 2**31, 2**63 - 1, -1, -(2**63))


def test_splitmix_gives_the_published_numbers() -> None:
    """The first outputs for seed 1234567, as printed with the reference C code."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert list(itertools.islice(splitmix_64_stream(1234567), 4)) == published
    assert [splitmix_64(1234567, index) for index in range(4)] == published


@over_table("key", KEYS)
def test_tensors_equal_python_integers(key: int) -> None:
    index = torch.tensor([0, 1, 2, 1000, 2**40, 2**62])
    assert [each % 2**64 for each in derive(key, index).tolist()] == [
        derive_reference(key, i) for i in index.tolist()
    ]
    assert hash_uniform(key, index).tolist() == [uniform_reference(key, i) for i in index.tolist()]
    keep = keep_mask(torch.tensor([key]).unsqueeze(1), 0.3, index)
    assert keep[0].tolist() == [keep_reference(key, 0.3, i) for i in index.tolist()]


def test_keys_of_a_tensor_equal_keys_one_by_one() -> None:
    keys, index = torch.tensor(KEYS), torch.arange(50)
    whole = hash_uniform(keys.unsqueeze(1), index)
    assert torch.equal(whole, torch.stack([hash_uniform(key, index) for key in KEYS]))


@over_table("full", [(7,), (5, 6), (3, 4, 5), (300, 1), (1, 140_001)])
def test_a_block_is_the_slice_of_the_whole(full: tuple[int, ...]) -> None:
    whole = normal(9, full, 0.02)
    offset = tuple(size // 3 for size in full)
    shape = tuple(size - start - (size > 4) for size, start in zip(full, offset, strict=True))
    block = normal_block(9, full, offset, shape, 0.02)
    slices = tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))
    assert torch.equal(block, whole[slices])


@pytest.mark.parametrize("full", [(7,), (300, 7), (3, 4, 5), (2, 1001)])
def test_numbers_do_not_depend_on_how_many_are_drawn_at_once(full, monkeypatch) -> None:
    whole, sizes, normal_at = normal(9, full, 0.02), [], counter_random._normal_at
    monkeypatch.setattr(
        counter_random, "_normal_at", lambda key, index: sizes.append(index.numel()) or normal_at(key, index)
    )
    for piece in (1, 6, 64, 1 << 24):
        monkeypatch.setattr(counter_random, "drawn_at_once", lambda device, piece=piece: piece)
        sizes.clear()
        assert torch.equal(normal(9, full, 0.02), whole), piece
        assert max(sizes) <= piece
        assert sum(sizes) == whole.numel()


def test_a_gpu_draws_16_million_numbers_at_once() -> None:
    """At 131,072, launches took two seconds for a model of 1.3 billion parameters."""
    assert [drawn_at_once(torch.device(name)) for name in ("cpu", "cuda", "cuda:3")] == [
        131_072,
        16_777_216,
        16_777_216,
    ]


def test_normal_of_no_dims_and_no_elements() -> None:
    assert normal(3, ()).shape == ()
    assert normal(3, ()).item() == normal(3, (4,))[0].item()
    assert normal(3, (0, 4)).shape == (0, 4)
    assert normal(3, (2, 4), device="meta").device.type == "meta"


def test_a_block_outside_the_whole_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`full_shape` \(4\) in dim 1, but is 2 \+ 3"):
        normal_block(0, (4, 4), (0, 2), (2, 3), 1.0)


def test_normal_moments_and_tails() -> None:
    x = normal(17, (1000, 1000)).double()
    assert abs(x.mean().item()) < 4e-3  # 4 standard errors
    assert abs(x.var().item() - 1) < 6e-3
    assert abs((x**4).mean().item() - 3) < 0.04
    assert abs((x.abs() > 3).double().mean().item() - 0.0027) < 2.1e-4
    assert abs((x[:, 1:] * x[:, :-1]).mean().item()) < 4e-3
    assert abs((x[1:] * x[:-1]).mean().item()) < 4e-3


def _chi_square(counts: torch.Tensor) -> float:
    expected = counts.sum() / counts.numel()
    return ((counts - expected) ** 2 / expected).sum().item()


def test_uniform_frequencies() -> None:
    """Chi-square with 255 degrees of freedom has mean 255 and standard deviation 22.6."""
    u = hash_uniform(5, torch.arange(1 << 20))
    assert u.min() >= 0
    assert u.max() < 1
    assert 165 < _chi_square(torch.histc(u.double(), 256, 0, 1)) < 345


def _keep(p: float, rows: int = 2048, columns: int = 1024) -> torch.Tensor:
    return keep_mask(torch.arange(rows).unsqueeze(1), p, torch.arange(columns)).double()


@over_table("p", [0.0, 0.01, 0.1, 0.5, 0.9])
def test_keep_frequency_overall_and_by_row_and_column(p: float) -> None:
    keep, variance = _keep(p), max(p * (1 - p), 1e-12)
    assert abs(keep.mean().item() - (1 - p)) < 4 * (variance / keep.numel()) ** 0.5 + 1e-9
    for dim in (0, 1):  # the sums' spread is binomial's: neither clumped nor too even
        sums = keep.sum(dim)
        spread = sums.var().item() / (variance * keep.shape[dim])
        assert p == 0.0 or abs(spread - 1) < 5 * (2 / sums.numel()) ** 0.5


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_kept_neighbours_are_uncorrelated(p: float) -> None:
    """Between rows, columns and diagonals at distances 1 to 64, and from one key to its neighbours."""
    centered = (_keep(p) - (1 - p)) / (p * (1 - p)) ** 0.5
    limit = 5 / centered.numel() ** 0.5
    for step in (1, 2, 3, 4, 8, 16, 32, 64):
        assert abs((centered[:, step:] * centered[:, :-step]).mean().item()) < limit, f"columns {step}"
        assert abs((centered[step:] * centered[:-step]).mean().item()) < limit, f"rows {step}"
        diagonal = centered[step:, step:] * centered[:-step, :-step]
        assert abs(diagonal.mean().item()) < limit, f"diagonal {step}"


def test_kept_patterns_of_eight_neighbours_are_equally_frequent() -> None:
    weights = 2 ** torch.arange(8)
    for view in (_keep(0.5), _keep(0.5).t()):
        bytes_ = (view.reshape(-1, 8).long() * weights).sum(1)
        assert 165 < _chi_square(torch.bincount(bytes_, minlength=256).double()) < 345


def test_flipping_any_bit_of_the_key_changes_half_of_the_choices() -> None:
    keys, index = torch.arange(64).unsqueeze(1) * 977, torch.arange(512)
    base = keep_mask(keys, 0.5, index)
    for bit in range(64):
        flipped = keep_mask(keys ^ (1 << bit if bit < 63 else -(1 << 63)), 0.5, index)
        assert abs((base != flipped).double().mean().item() - 0.5) < 0.02, f"bit {bit}"


def test_probability_must_be_a_share() -> None:
    for p in (-0.1, 1.0, float("nan")):
        with pytest.raises(ValueError, match=r"`p` must be in \[0, 1\)"):
            keep_mask(torch.zeros(1, dtype=torch.int64), p, torch.arange(3))
