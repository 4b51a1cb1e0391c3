"""The header of a safetensors file, written and strictly read.

A file begins with the header's length, 8 bytes, little-endian. The header is a JSON object ``{name: {"dtype",
"shape", "data_offsets": [begin, end]}}``, padded with spaces; its key ``__metadata__`` may hold strings. The
bytes of the tensors follow without gaps. Offsets count from the end of the header
(https://huggingface.co/docs/safetensors).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

LENGTH_BYTES = 8
# The library's own limit, so that every file that it opens can be opened here.
LARGEST_HEADER = 100_000_000
DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "F64": torch.float64,
        "F32": torch.float32,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "I64": torch.int64,
        "I32": torch.int32,
        "I16": torch.int16,
        "I8": torch.int8,
        "U64": torch.uint64,
        "U32": torch.uint32,
        "U16": torch.uint16,
        "U8": torch.uint8,
        "BOOL": torch.bool,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E5M2": torch.float8_e5m2,
    }
)
NAME_OF_DTYPE: Mapping[torch.dtype, str] = MappingProxyType({dtype: name for name, dtype in DTYPES.items()})
_METADATA = "__metadata__"
_ALIGNMENT = 64
_LARGEST = 2**63 - 1


@dataclass(frozen=True)
class HeaderEntry:
    """One tensor of a file; its bytes are `start` to `stop`, counted from the beginning of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


def encode_header(
    tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str] | None = None
) -> bytes:
    """All bytes of a file before its tensors, which must follow in this order.

    Raises:
        ValueError: a name occurs twice or is reserved, a dtype has no name in the format, or the header is
            too large.
    """
    content: dict[str, object] = {_METADATA: dict(metadata)} if metadata else {}
    offset = 0
    for name, dtype, shape in tensors:
        if name == _METADATA or name in content:
            raise ValueError(f"`{name}` must be the name of one tensor, but is reserved or occurs twice")
        if dtype not in NAME_OF_DTYPE:
            raise ValueError(f"`{name}` must have a dtype that safetensors knows, but has {dtype}")
        end = offset + math.prod(shape) * dtype.itemsize
        content[name] = {"dtype": NAME_OF_DTYPE[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-(LENGTH_BYTES + len(text)) % _ALIGNMENT)
    if len(text) > LARGEST_HEADER:
        raise ValueError(f"the header must have at most {LARGEST_HEADER} bytes, but has {len(text)}")
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def decode_header(text: bytes, data_bytes: int) -> tuple[dict[str, HeaderEntry], dict[str, str]]:
    """The tensors of a header in the order of their bytes, and the metadata.

    Args:
        text: the JSON with the spaces after it.
        data_bytes: the number of bytes in the file after the header.

    Raises:
        ValueError: the header does not follow the format exactly; the message says why.
    """
    try:
        content = json.loads(text.decode(), object_pairs_hook=distinct, parse_int=_size)
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None
    if not text.startswith(b"{"):
        raise ValueError("the JSON is not an object")
    metadata = content.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError(f"`{_METADATA}` does not hold strings")
    begin = LENGTH_BYTES + len(text)
    entries = {name: _entry(name, stored, begin) for name, stored in content.items()}
    position = begin
    # An empty tensor comes before the one that begins where it does.
    ordered = dict(sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)))
    for name, entry in ordered.items():
        if entry.start != position:
            raise ValueError(f"{name!r} begins at byte {entry.start} instead of {position}")
        position = entry.stop
    if position != begin + data_bytes:
        raise ValueError(f"the tensors end at byte {position} of {begin + data_bytes}")
    return ordered, metadata


def _entry(name: str, stored: object, begin: int) -> HeaderEntry:
    name.encode()  # raises on lone surrogates, which cannot be printed
    if not isinstance(stored, dict) or set(stored) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{name!r} is not described by dtype, shape and data_offsets")
    dtype = DTYPES.get(stored["dtype"]) if isinstance(stored["dtype"], str) else None
    if dtype is None:
        raise ValueError(f"{name!r} has the unknown dtype {stored['dtype']!r:.40}")
    shape, offsets = stored["shape"], stored["data_offsets"]
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise ValueError(f"{name!r} has a shape or data_offsets that are not lists of sizes")
    # torch computes strides as if a dim of size 0 had size 1, and they must not overflow.
    extent = dtype.itemsize
    for size in shape:
        extent *= max(size, 1)
        if extent > _LARGEST:
            raise ValueError(f"{name!r} has a shape beyond all memory")
    if offsets[1] - offsets[0] != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{name!r} has data_offsets that do not fit its shape and dtype")
    return HeaderEntry(dtype, tuple(shape), begin + offsets[0], begin + offsets[1])


def _are_sizes(value: object) -> bool:
    # To `isinstance` a bool is an int.
    return isinstance(value, list) and all(type(item) is int for item in value)


def distinct(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """An `object_pairs_hook` for `json.loads`, which itself would silently take the last of equal keys.

    Raises:
        ValueError: a key occurs twice.
    """
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        raise ValueError("a key occurs twice")
    return mapping


def _size(digits: str) -> int:
    # Digits are counted first: converting millions of them takes minutes.
    if len(digits) > 19 or not 0 <= int(digits) <= _LARGEST:
        raise ValueError(f"{digits:.30} is not a size")
    return int(digits)
