from __future__ import annotations

import numpy as np
import pytest

from megazero.data import index_build
from megazero.data.index_build import (
    blending_index_reference,
    build_blending_index,
    build_exhaustive_blending_index,
    build_gpt_index,
    build_sample_index,
    normalized,
    plan_samples,
)
from megazero.data.native import NATIVE
from megazero.errors import DataError

LENGTHS = np.array([5, 3, 7, 2, 1], dtype=np.int32)
GOLDEN = [
    # samples wanted, seed, epochs, separate, document index, sample index, shuffle index
    (
        8, 1234, 2, False, [2, 2, 4, 1, 0, 3, 4, 0, 1, 3],
        [[0, 0], [0, 4], [1, 1], [1, 5], [3, 1], [4, 2], [5, 1], [7, 2], [8, 1]],
        [7, 5, 6, 0, 4, 3, 2, 1],
    ),
    (4, 1234, 1, False, [4, 0, 1, 2, 3], [[0, 0], [1, 3], [2, 2], [3, 3], [4, 0]], [2, 1, 3, 0]),
    (
        6, 42, 2, True, [1, 4, 2, 0, 3, 3, 1, 2, 0, 4],
        [[0, 0], [2, 0], [2, 4], [3, 1], [4, 0], [6, 0], [7, 1], [7, 5], [8, 2]],
        [1, 0, 3, 2, 7, 5, 4, 6],
    ),
]  # fmt: skip

needs_native = pytest.mark.skipif(NATIVE is None, reason="the compiled helpers are not built")


@pytest.mark.parametrize("native", [False, pytest.param(True, marks=needs_native)])
@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: f"N{case[0]}-seed{case[1]}")
def test_golden_index(case, native, monkeypatch):
    if not native:
        monkeypatch.setattr(index_build, "NATIVE", None)
    wanted, seed, epochs, separate, documents, samples, shuffle = case
    plan = plan_samples(18, 4, wanted)
    assert (plan.epochs, plan.separate_last) == (epochs, separate)
    index = build_gpt_index(LENGTHS, range(5), plan, seed)
    assert index.document_index.tolist() == documents
    assert index.sample_index.tolist() == samples
    assert index.shuffle_index.tolist() == shuffle
    dtypes = (index.document_index.dtype, index.sample_index.dtype, index.shuffle_index.dtype)
    assert dtypes == (np.int32, np.int32, np.uint32)


def in_memory(lengths, documents, length, samples, extra=1) -> np.ndarray:
    """All rows at once, by prefix sums of all documents."""
    sizes = lengths[documents].astype(np.int64)
    ends = np.cumsum(sizes)
    needed = np.arange(1, samples + 1, dtype=np.int64) * length + extra
    position = np.searchsorted(ends, needed, side="left")
    rows = np.zeros((samples + 1, 2), dtype=np.int32)
    rows[1:, 0] = position
    rows[1:, 1] = needed - extra - (ends[position] - sizes[position])
    return rows


def random_case(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, int, int, int]:
    """lengths (some 0), documents, sequence length, samples, extra."""
    lengths = rng.integers(0, rng.integers(2, 40), rng.integers(1, 60)).astype(np.int32)
    documents = rng.integers(0, lengths.size, rng.integers(1, 90)).astype(rng.choice([np.int32, np.int64]))
    length, extra = int(rng.integers(1, 50)), int(rng.integers(0, 2))
    samples = max(0, int(lengths[documents].sum()) - extra) // length
    return lengths, documents, length, samples, extra


@pytest.mark.parametrize("native", [False, pytest.param(True, marks=needs_native)])
def test_a_walk_in_blocks_equals_prefix_sums_of_everything(native, monkeypatch):
    if not native:
        monkeypatch.setattr(index_build, "NATIVE", None)
    rng = np.random.default_rng(1)
    for _ in range(300):
        case = random_case(rng)
        monkeypatch.setattr(index_build, "_WALK_BLOCK", int(rng.integers(1, 30)))
        rows, expected = build_sample_index(*case), in_memory(*case)
        assert rows.dtype == expected.dtype
        np.testing.assert_array_equal(rows, expected)


def test_rows_in_a_file_are_those_in_memory_and_the_file_has_no_name(tmp_path):
    documents = np.array([2, 0, 1, 2], dtype=np.int32)
    rows = build_sample_index(LENGTHS, documents, 4, 5, 1, tmp_path)
    np.testing.assert_array_equal(rows, in_memory(LENGTHS, documents, 4, 5))
    assert not rows.flags.writeable
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    again = build_sample_index(LENGTHS, documents, 4, 5, 1, tmp_path / "file")
    np.testing.assert_array_equal(again, rows)


def test_sample_rows_cut_the_stream_every_sequence_length():
    """Law: row k lies k * T tokens into the concatenated documents."""
    rng = np.random.default_rng(2)
    for _ in range(200):
        lengths, documents, length, samples, extra = random_case(rng)
        rows = build_sample_index(lengths, documents, length, samples, extra).astype(np.int64)
        starts = np.concatenate(([0], np.cumsum(lengths[documents], dtype=np.int64)))
        np.testing.assert_array_equal(starts[rows[:, 0]] + rows[:, 1], np.arange(samples + 1) * length)


@needs_native
def test_lengths_of_a_mapped_index_are_unaligned():
    raw = np.frombuffer(b"\0\0" + LENGTHS.tobytes(), dtype=np.uint8)
    lengths = raw[2:].view("<i4")
    documents = np.arange(5, dtype=np.int32)
    expected = build_sample_index(LENGTHS, documents, 4, 4)
    np.testing.assert_array_equal(build_sample_index(lengths, documents, 4, 4), expected)


@pytest.mark.parametrize("native", [False, pytest.param(True, marks=needs_native)])
def test_too_few_tokens_for_the_samples(native, monkeypatch):
    if not native:
        monkeypatch.setattr(index_build, "NATIVE", None)
    with pytest.raises(DataError, match="5 samples \\* 4 \\+ 1 = 21"):
        build_sample_index(LENGTHS, np.arange(5, dtype=np.int32), 4, 5)


@needs_native
@pytest.mark.parametrize("wrong", [-1, 5])
def test_compiled_builder_refuses_a_sequence_that_does_not_exist(wrong):
    with pytest.raises(DataError, match="does not exist"):
        build_sample_index(LENGTHS, np.array([0, wrong], dtype=np.int32), 4, 2)


def test_positions_beyond_32_bits_of_tokens():
    lengths = np.array([2**31 - 1, 2**31 - 1, 2**31 - 1, 9], dtype=np.int32)
    documents = np.array([0, 1, 2, 3], dtype=np.int32)
    rows = build_sample_index(lengths, documents, 1 << 30, 6)
    quarter = 1 << 30
    assert rows.tolist() == [[0, 0], [0, quarter], [1, 1], [1, quarter + 1], [2, 2], [2, quarter + 2], [3, 3]]


class TestPlan:
    def test_one_epoch_when_nothing_is_asked(self):
        plan = plan_samples(18, 4, None)
        assert (plan.epochs, plan.samples, plan.separate_last) == (1, 4, False)

    def test_counts_of_several_epochs(self):
        plan = plan_samples(18, 4, 6)
        assert (plan.epochs, plan.samples, plan.samples_before_last, plan.separate_last) == (2, 8, 4, True)

    @pytest.mark.parametrize(("asked", "separate"), [(17, True), (18, False), (20, False)])
    def test_a_last_epoch_is_apart_if_less_than_four_fifths_of_it_are_asked_for(self, asked, separate):
        """Ten samples each: 7, 8 and 10 of the second."""
        plan = plan_samples(41, 4, asked)
        assert (plan.epochs, plan.samples_before_last, plan.separate_last) == (2, 10, separate)

    def test_smallest_number_of_epochs(self):
        for tokens in range(1, 30):
            for wanted in range(1, 12):
                epochs = plan_samples(tokens, 4, wanted).epochs
                assert (epochs * tokens - 1) // 4 >= wanted
                assert epochs == 1 or ((epochs - 1) * tokens - 1) // 4 < wanted

    def test_exact_epochs(self):
        plan = plan_samples(18, 4, 2, epochs=3)
        assert (plan.epochs, plan.samples, plan.separate_last) == (3, 13, False)

    def test_without_an_extra_token(self):
        assert plan_samples(16, 4, None, extra=0).samples == 4
        assert plan_samples(16, 4, None, extra=1).samples == 3

    @pytest.mark.parametrize(("tokens", "wanted"), [(0, 1), (0, None), (4, None)])
    def test_too_little_text_shows_the_arithmetic(self, tokens, wanted):
        with pytest.raises(DataError, match=f"sequence_length \\+ 1 = 5 for one sample, but are {tokens} "):
            plan_samples(tokens, 4, wanted)

    @pytest.mark.parametrize(("length", "wanted", "epochs"), [(0, 1, None), (4, 0, None), (4, None, 0)])
    def test_impossible_numbers(self, length, wanted, epochs):
        with pytest.raises(DataError, match="must be at least 1"):
            plan_samples(100, length, wanted, epochs)


class TestBlending:
    def test_golden(self):
        datasets, samples = build_blending_index(np.array([0.5, 0.3, 0.2]), 10)
        assert datasets.tolist() == [0, 1, 2, 0, 1, 0, 2, 0, 1, 0]
        assert samples.tolist() == [0, 0, 0, 1, 1, 2, 1, 3, 2, 4]
        assert (datasets.dtype, samples.dtype) == (np.int16, np.int64)

    def test_golden_exhaustive(self):
        datasets, samples = build_exhaustive_blending_index(np.array([3, 2, 1]))
        assert datasets.tolist() == [0, 1, 2, 0, 1, 0]
        assert samples.tolist() == [0, 0, 0, 1, 1, 2]

    @needs_native
    def test_compiled_equals_reference(self):
        rng = np.random.default_rng(3)
        for _ in range(200):
            weights = rng.random(rng.integers(1, 9)) + 1e-3
            size = int(rng.integers(0, 120))
            for compiled, reference in zip(
                build_blending_index(weights, size),
                blending_index_reference(normalized(weights), None, size),
                strict=True,
            ):
                np.testing.assert_array_equal(compiled, reference)
            sizes = rng.integers(0, 30, weights.size) + (np.arange(weights.size) == 0)
            for compiled, reference in zip(
                build_exhaustive_blending_index(sizes),
                blending_index_reference(sizes / sizes.sum(), sizes, int(sizes.sum())),
                strict=True,
            ):
                np.testing.assert_array_equal(compiled, reference)

    @needs_native
    def test_ties_fall_as_in_the_reference(self):
        for weights in ([1, 1, 1], [1, 1, 2, 2], [3, 3, 3, 3, 3, 3, 3], [0.1] * 10, [1, 2, 1, 2, 1]):
            shares = normalized(weights)
            expected = blending_index_reference(shares, None, 200)[0]
            assert build_blending_index(shares, 200)[0].tolist() == expected.tolist()

    def test_ratio_is_right_at_every_moment(self):
        weights = normalized([0.7, 0.2, 0.06, 0.04])
        datasets, _ = build_blending_index(weights, 5000)
        counts = np.cumsum(datasets[:, None] == np.arange(4), axis=0)
        wanted = weights * np.arange(1, 5001)[:, None]
        assert np.abs(counts - wanted).max() < 2

    def test_exhaustive_takes_every_sample_once(self):
        sizes = [40, 0, 7, 1, 23]
        datasets, samples = build_exhaustive_blending_index(np.array(sizes))
        pairs = sorted(zip(datasets.tolist(), samples.tolist(), strict=True))
        assert pairs == [(d, s) for d, size in enumerate(sizes) for s in range(size)]

    @pytest.mark.parametrize("weights", [[], [1, 0], [1, -1], [np.nan], [np.inf]])
    def test_weights_that_are_none(self, weights):
        with pytest.raises(DataError, match="positive numbers"):
            build_blending_index(np.array(weights), 3)

    @pytest.mark.parametrize("sizes", [[], [0, 0], [3, -1]])
    def test_sizes_that_are_none(self, sizes):
        with pytest.raises(DataError, match="`sizes`"):
            build_exhaustive_blending_index(np.array(sizes))


def test_works_without_the_compiled_helpers(monkeypatch):
    monkeypatch.setattr(index_build, "NATIVE", None)
    documents = np.arange(5, dtype=np.int32)
    assert build_sample_index(LENGTHS, documents, 4, 4).tolist()[-1] == [3, 1]
    assert build_blending_index(np.array([1.0, 1.0]), 4)[0].tolist() == [0, 1, 0, 1]
    assert build_exhaustive_blending_index(np.array([1, 2]))[0].tolist() == [1, 0, 1]
