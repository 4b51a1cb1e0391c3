"""A header that lies is refused in words, whatever the lie, with no more memory than the file has."""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megazero.checkpoint.safetensors_header import encode_header
from megazero.checkpoint.tensor_file import TensorFile
from megazero.errors import DamagedCheckpointError
from tests.tables import over_table


def read_all(path: Path) -> dict[str, torch.Tensor]:
    with TensorFile(path) as file:
        return {name: file.tensor(name) for name in file.entries}


def header_file(path: Path, header: bytes, data: bytes = b"", length: int | None = None) -> None:
    length = len(header) if length is None else length
    path.write_bytes(length.to_bytes(8, "little") + header + data)


def described(dtype="F32", shape=(1,), offsets=(0, 4), **more) -> dict:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets), **more}


def text_of(**tensors) -> bytes:
    return json.dumps(tensors).encode()


GOOD = text_of(x=described())
HUGE = 2**62
HOSTILE = {
    "not JSON": b"{]",
    "not UTF-8": b'{"\xff": 1}',
    "UTF-16": GOOD.decode().encode("utf-16"),
    "a byte order mark": b"\xef\xbb\xbf" + GOOD,
    "a list": b"[]",
    "a number": b"3",
    "nothing": b"",
    "spaces before": b" " + GOOD,
    "text after": GOOD + b"x",
    "zeros after": GOOD + b"\0\0",
    "nested deeply": b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "NaN": b'{"x": NaN}',
    "a tensor twice": b'{"x": %b, "x": %b}' % ((json.dumps(described()).encode(),) * 2),
    "a field twice": GOOD[:-2] + b', "dtype": "F32"}}',
    "a number for a tensor": text_of(x=1),
    "a missing field": text_of(x={"dtype": "F32", "shape": [1]}),
    "another field": text_of(x=described(more=1)),
    "half a character": b'{"\\ud800": %b}' % json.dumps(described()).encode(),
    "an unknown dtype": text_of(x=described("F31")),
    "a dtype that is a list": text_of(x=described([])),
    "a dtype of four bits": text_of(x=described("F4", (8,))),
    "a size that is true": text_of(x=described(shape=(True,))),
    "a fraction": text_of(x=described(shape=(1.0,))),
    "a size in text": text_of(x=described(shape=("1",))),
    "a shape that is a number": text_of(x={**described(), "shape": 1}),
    "a negative size": text_of(x=described(shape=(-1,), offsets=(0, -4))),
    "two negative sizes": text_of(x=described(shape=(-1, -1))),
    "a negative offset": text_of(x=described(offsets=(-4, 0))),
    "offsets backwards": text_of(x=described(offsets=(4, 0))),
    "one offset": text_of(x=described(offsets=(0,))),
    "three offsets": text_of(x=described(offsets=(0, 4, 4))),
    "digits without end": b'{"x": {"dtype": "F32", "shape": [%b], "data_offsets": [0, 4]}}' % (b"9" * 10**6),
    "a shape too large": text_of(x=described(shape=(2,))),
    "a shape too small": text_of(x=described(shape=(0,))),
    "a shape beyond the file": text_of(x=described(shape=(HUGE,), offsets=(0, 4 * HUGE))),
    "a product that wraps to 4 bytes": text_of(x=described("U8", (2**33, 2**31, 4), (0, 4))),
    "a product that wraps to 0": text_of(x=described(), y=described("U8", (HUGE, 4), (4, 4))),
    "zero times too much": text_of(x=described(), y=described("U8", (0, HUGE, HUGE), (4, 4))),
    "too much times zero": text_of(x=described(), y=described("U8", (HUGE, HUGE, 0), (4, 4))),
    "a size beyond 64 bits": text_of(x=described(), y=described("U8", (0, 2**64), (4, 4))),
    "data that begins later": text_of(x=described("U8", (3,), (1, 4))),
    "data that ends before the file": text_of(x=described("U8", (3,), (0, 3))),
    "data that ends after the file": text_of(x=described("U8", (5,), (0, 5))),
    "a gap": text_of(x=described("U8", (1,), (0, 1)), y=described("U8", (2,), (2, 4))),
    "an overlap": text_of(x=described("U8", (3,), (0, 3)), y=described("U8", (2,), (2, 4))),
    "the same bytes twice": text_of(x=described(), y=described()),
    "an empty tensor within another": text_of(x=described(), y=described(shape=(0,), offsets=(2, 2))),
    "metadata that is a list": text_of(__metadata__=[], x=described()),
    "metadata of numbers": text_of(__metadata__={"a": 1}, x=described()),
}


def refusal(path: Path) -> str:
    """The message with which a file is refused, using no more memory than the file has bytes."""
    tracemalloc.start()
    try:
        with pytest.raises(DamagedCheckpointError) as caught:
            TensorFile(path)
        assert tracemalloc.get_traced_memory()[1] < (1 << 20) + 10 * min(path.stat().st_size, 10 << 20)
    finally:
        tracemalloc.stop()
    assert len(str(caught.value)) < 1000
    return str(caught.value)


@over_table("header", HOSTILE.values(), ids=HOSTILE)
def test_a_header_that_lies_is_refused(tmp_path, header):
    header_file(tmp_path / "f", GOOD, b"data")
    assert set(read_all(tmp_path / "f")) == {"x"}
    header_file(tmp_path / "f", header, b"data")
    assert f"`{tmp_path / 'f'}` must be as it was written, but its header is no" in refusal(tmp_path / "f")


@over_table("length", [0, 1, len(GOOD) - 1, len(GOOD) + 1, len(GOOD) + 5, 2**31, 2**63, 2**64 - 1])
def test_a_header_length_that_lies_is_refused(tmp_path, length):
    header_file(tmp_path / "f", GOOD, b"data", length)
    assert str(tmp_path / "f") in refusal(tmp_path / "f")


def test_a_header_beyond_all_reason_is_refused_unread(tmp_path):
    header_file(tmp_path / "f", GOOD, b"data", 100_000_001)
    os.truncate(tmp_path / "f", 1 << 30)
    assert "a header of 100000001 bytes" in refusal(tmp_path / "f")


def test_tensors_may_be_described_in_any_order(tmp_path):
    """The library accepts this too; an empty tensor may be before, between or after the others."""
    tensors = {
        "c": described("U8", (0,), (4, 4)),
        "b": described("U8", (3,), (1, 4)),
        "d": described("U8", (0, 5), (1, 1)),
        "a": described("U8", (1,), (0, 1)),
        "e": described("F64", (2, 0), (0, 0)),
    }
    header_file(tmp_path / "f", text_of(**tensors), b"\1\2\3\4")
    loaded = read_all(tmp_path / "f")
    assert list(loaded) == ["e", "a", "d", "b", "c"]
    assert (loaded["a"].tolist(), loaded["b"].tolist()) == ([1], [2, 3, 4])
    assert load_file(tmp_path / "f").keys() == loaded.keys()


def test_a_header_too_large_to_read_is_not_written(monkeypatch):
    monkeypatch.setattr("megazero.checkpoint.safetensors_header.LARGEST_HEADER", 1000)
    encode_header([(f"{i}", torch.uint8, (1,)) for i in range(10)])
    with pytest.raises(ValueError, match="at most 1000 bytes"):
        encode_header([(f"{i}", torch.uint8, (1,)) for i in range(20)])


@over_table(
    ("tensors", "message"),
    [
        (
            [("x", torch.complex32, (1,))],
            "`x` must have a dtype that safetensors knows, but has torch.complex32",
        ),
        (
            [("x", torch.uint8, (1,))] * 2,
            "`x` must be the name of one tensor, but is reserved or occurs twice",
        ),
        ([("__metadata__", torch.uint8, (1,))], "`__metadata__` must be the name of one tensor"),
    ],
)
def test_tensors_that_no_header_can_hold_are_refused(tensors, message):
    with pytest.raises(ValueError, match=message):
        encode_header(tensors)
