from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megazero.data_efficiency.metric_index import MetricIndex
from megazero.errors import DataError
from tests.data_efficiency.row_files import write_rows
from tests.tables import over_table

ROWS, VALUES = [[4, 0], [2], [5, 1, 3]], [[-3], [7], [900]]


def pair(folder: Path, rows=ROWS, values=VALUES, dtype="<i8", sample_dtype="<i4") -> tuple[str, str]:
    return (
        write_rows(folder / "m_index_to_sample", rows, sample_dtype),
        write_rows(folder / "m_index_to_metric", values, dtype),
    )


def cut(path: str, by: int) -> None:
    content = Path(path).read_bytes()
    Path(path).write_bytes(content[:-by])


def test_the_order_of_a_metric(tmp_path):
    index = MetricIndex.open(*pair(tmp_path))
    assert index.values.tolist() == [-3, 7, 900]
    assert index.ends.tolist() == [2, 3, 6]
    assert index.samples.tolist() == [4, 0, 2, 5, 1, 3]
    assert (index.values.dtype, index.ends.dtype, len(index)) == (np.int64, np.int64, 6)
    index.verify()
    index.verify(total=7)


def test_samples_stay_on_disk(tmp_path):
    samples = MetricIndex.open(*pair(tmp_path)).samples
    while not isinstance(samples, np.memmap):
        samples = samples.base
    assert not MetricIndex.open(*pair(tmp_path)).samples.flags.writeable


@over_table("dtype", ["u1", "<u2", "<u4", "<u8", "i1", "<i2", "<i4", "<i8"])
def test_every_type_of_deepspeeds_table(tmp_path, dtype):
    """Codes 6 to 8 mean other types to Megatron's reader, which gives floats or half ids without an error."""
    index = MetricIndex.open(*pair(tmp_path, values=[[1], [5], [90]], dtype=dtype, sample_dtype=dtype))
    assert index.values.tolist() == [1, 5, 90]
    assert index.samples.tolist() == [4, 0, 2, 5, 1, 3]


def test_uint16_with_megatrons_code_is_known_by_its_size(tmp_path):
    prefixes = write_rows(tmp_path / "a", ROWS, "<u2", code=8), write_rows(tmp_path / "b", [[1], [5], [9]])
    assert MetricIndex.open(*prefixes).samples.tolist() == [4, 0, 2, 5, 1, 3]


def test_floating_point_values_are_refused(tmp_path):
    samples, metric = pair(tmp_path)
    write_rows(Path(metric), [[0.5], [1.5], [2.5]], "<f8", code=6)
    with pytest.raises(DataError, match=r"m_index_to_metric.bin` must hold integers, but holds float64"):
        MetricIndex.open(samples, metric)


def test_a_value_beyond_int64_is_refused(tmp_path):
    with pytest.raises(DataError, match="fit 64 bits"):
        MetricIndex.open(*pair(tmp_path, values=[[1], [2], [1 << 63]], dtype="<u8"))


def test_values_at_both_ends_of_int64(tmp_path):
    extremes = [[-(1 << 63)], [0], [(1 << 63) - 1]]
    index = MetricIndex.open(*pair(tmp_path, values=extremes))
    assert index.values.tolist() == [value for (value,) in extremes]


@pytest.mark.parametrize("values", [[[1], [1], [2]], [[1], [3], [2]]])
def test_values_must_ascend(tmp_path, values):
    with pytest.raises(DataError, match="m_index_to_metric.bin must be ascending"):
        MetricIndex.open(*pair(tmp_path, values=values))


def test_rows_and_values_must_be_as_many(tmp_path):
    with pytest.raises(DataError, match="row for each of the 2 values.*but has 3"):
        MetricIndex.open(*pair(tmp_path, values=[[1], [2]]))


def test_a_row_of_two_values_is_no_metric(tmp_path):
    with pytest.raises(DataError, match="row 1 has 2"):
        MetricIndex.open(*pair(tmp_path, values=[[1], [2, 3], [4]]))


@pytest.mark.parametrize("rows", [[], [[], [], []]])
def test_an_empty_index_is_refused(tmp_path, rows):
    with pytest.raises(DataError, match="must list samples, but is empty"):
        MetricIndex.open(*pair(tmp_path, rows=rows, values=VALUES[: len(rows)]))


@over_table("file", range(4))
def test_a_missing_file_is_named(tmp_path, file):
    prefixes = pair(tmp_path)
    path = Path(prefixes[file % 2] + (".bin", ".idx")[file // 2])
    path.unlink()
    with pytest.raises(DataError, match=path.name):
        MetricIndex.open(*prefixes)


@over_table("suffix", [".bin", ".idx"])
@over_table("which", [0, 1])
@over_table("by", [1, 8, 10_000])
def test_a_file_that_is_cut_short_is_named(tmp_path, suffix, which, by):
    prefixes = pair(tmp_path)
    cut(prefixes[which] + suffix, by)
    with pytest.raises(DataError, match=Path(prefixes[which]).name):
        MetricIndex.open(*prefixes)


@over_table(
    ("at", "byte", "message"),
    [
        (0, 0x58, "must start with"),
        (9, 9, "`version` of .* must be 1, but is 9"),
        (17, 0, "element code"),
        (17, 9, "element code"),
        (18, 200, "must be .* bytes for 200 sequences"),
        (37, 0x80, "`length` of sequence . .* must be at least 0"),
        (46, 1, "`offset` of sequence"),
    ],
)
def test_a_damaged_header_is_refused(tmp_path, at, byte, message):
    prefixes = pair(tmp_path)
    path = Path(prefixes[0] + ".idx")
    content = bytearray(path.read_bytes())
    content[at] = byte
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        MetricIndex.open(*prefixes)


@pytest.mark.parametrize("rows", [[[4, 0], [2], [5, 1, 4]], [[4, 0], [2], [5, 5, 1]]])
def test_a_sample_twice_is_found(tmp_path, rows):
    with pytest.raises(DataError, match=r"`sample` [45] must come once in here"):
        MetricIndex.open(*pair(tmp_path, rows=rows)).verify(name="here")


def test_a_sample_twice_is_found_across_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr("megazero.data_efficiency.metric_index._BLOCK", 2)
    with pytest.raises(DataError, match="`sample` 4 must come once"):
        MetricIndex.open(*pair(tmp_path, rows=[[4, 0], [2], [5, 1, 4]])).verify()


@pytest.mark.parametrize("wrong", [-1, 6])
def test_a_sample_of_another_dataset_is_found(tmp_path, wrong):
    with pytest.raises(DataError, match=rf"in 0..5, but is {wrong};"):
        MetricIndex.open(*pair(tmp_path, rows=[[4, 0], [2], [wrong, 1, 3]])).verify()
