"""The file layout of Megatron's indexed datasets: parsing an `.idx`, and checking it.

A dataset is two files. `prefix.bin` holds the raw little-endian token ids of all sequences, concatenated.
`prefix.idx` says where each *sequence* (a run of tokens) and each *document* (a run of sequences) begins. Two
kinds of `.idx` exist: "MMIDIDX" version 1, which every current tool writes, and the older "TNTIDX"
(`--data-impl lazy|cached`). The layouts are Megatron-LM's and fairseq's. Their readers check only the magic
and the version, so that a damaged index reads as wrong data; here everything that can be checked is.

Every check takes O(S) time for S sequences, works on slices of the mapped file, and compares Python integers
before anything is allocated, so that a hostile count is refused.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np

from megazero.errors import DataError

MMIDIDX_MAGIC = b"MMIDIDX\x00\x00"
TNTIDX_MAGIC = b"TNTIDX\x00\x00"
MMIDIDX_HEADER = struct.Struct("<9sQBQQ")  # magic, version, element code, sequences, document entries
TNTIDX_HEADER = struct.Struct("<8sQQQQQQ")  # magic, version, code, element size, items, sizes, documents

DTYPE_CODES: Mapping[int, np.dtype] = MappingProxyType(
    {
        1: np.dtype("u1"),
        2: np.dtype("i1"),
        3: np.dtype("<i2"),
        4: np.dtype("<i4"),
        5: np.dtype("<i8"),
        8: np.dtype("<u2"),
    }
)
FLOAT_CODES = MappingProxyType({6: "float64", 7: "float32"})
CODE_OF_DTYPE = MappingProxyType({dtype: code for code, dtype in DTYPE_CODES.items()})

_CHUNK = 1 << 20  # sequences per vectorised check: bounds memory, and int32 * 8 bytes * 2^20 fits int64


@dataclass(frozen=True)
class IndexTables:
    """The checked content of an `.idx`, as views of the mapped file, which may be unaligned.

    lengths: int32 [S], in tokens; offsets: int64 [S], in bytes of the `.bin`; document_index: int64
    [documents + 1], from 0 to S; modes: int8 [S] for a multimodal dataset, else None; total_tokens: the sum
    of lengths.
    """

    dtype: np.dtype
    lengths: np.ndarray
    offsets: np.ndarray
    document_index: np.ndarray
    modes: np.ndarray | None
    total_tokens: int


def dtype_for_vocab(vocab_size: int) -> np.dtype:
    """The element type that Megatron chooses for a vocabulary: uint16 below 65,500 ids, else int32."""
    return np.dtype("<u2") if vocab_size < 65500 else np.dtype("<i4")


def normal_dtype(dtype: np.dtype | type | str) -> np.dtype:
    """`dtype` as one of the format's little-endian integer types; DataError for other types."""
    normal = np.dtype(dtype).newbyteorder("<")
    if normal not in CODE_OF_DTYPE:
        allowed = ", ".join(sorted(d.name for d in CODE_OF_DTYPE))
        raise DataError(
            f"`dtype` must be one of {allowed}, but is {np.dtype(dtype)}; choose uint16 or int32."
        )
    return normal


def parse_mmididx(path: Path, index: np.ndarray, bin_size: int, multimodal: bool = False) -> IndexTables:
    """Parse and check an MMIDIDX file.

    path: of the `.idx`, for messages; index: the bytes of the `.idx`, uint8 [file size]; bin_size: the size
    of the `.bin` in bytes. Raises DataError, naming the file, the field and its value.
    """
    code, sequences, entries = read_mmididx_header(path, index)
    dtype = _dtype_of_code(path, code)
    check_file_size(path, index.size, sequences, entries, multimodal)
    lengths, offsets, rest = split_mmididx(index, sequences)
    tables = IndexTables(
        dtype=dtype,
        lengths=lengths,
        offsets=offsets,
        document_index=rest[: 8 * entries].view("<i8"),
        modes=rest[8 * entries :].view("i1") if multimodal else None,
        total_tokens=bin_size // dtype.itemsize,
    )
    _check_documents(path, tables.document_index, sequences)
    check_sequences(path, tables.lengths, tables.offsets, dtype.itemsize, bin_size)
    return tables


def read_mmididx_header(path: Path, index: np.ndarray) -> tuple[int, int, int]:
    """Read (element code, sequences, document entries) from the bytes of an MMIDIDX file, uint8 [file size].

    Raises DataError for another kind or version, and for a file shorter than a header.
    """
    code, sequences, entries = _header(path, index, MMIDIDX_HEADER, MMIDIDX_MAGIC)
    return code, sequences, entries


def split_mmididx(index: np.ndarray, sequences: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Split the bytes of an MMIDIDX file into views: lengths int32 [S], offsets int64 [S], the rest."""
    offsets_at = MMIDIDX_HEADER.size + 4 * sequences
    end = offsets_at + 8 * sequences
    lengths = index[MMIDIDX_HEADER.size : offsets_at].view("<i4")
    return lengths, index[offsets_at:end].view("<i8"), index[end:]


def parse_tntidx(path: Path, index: np.ndarray, bin_size: int) -> IndexTables:
    """Parse and check a TNTIDX file of one-dimensional items; arguments and errors as in `parse_mmididx`."""
    code, itemsize, items, sizes, entries = _header(path, index, TNTIDX_HEADER, TNTIDX_MAGIC)
    dtype = _dtype_of_code(path, code)
    if itemsize != dtype.itemsize:
        raise DataError(
            f"`element size` of {path} must be {dtype.itemsize} for {dtype.name}, but is {itemsize}; "
            "the header is damaged."
        )
    expected = TNTIDX_HEADER.size + 16 * (items + 1) + 8 * sizes + 8 * entries
    if items != sizes or expected != index.size:
        raise DataError(
            f"`{path}` must be {expected} bytes with one size per item, but is {index.size} bytes with "
            f"{items} items and {sizes} sizes; the file is damaged or not one-dimensional."
        )
    words = index[TNTIDX_HEADER.size :].view("<i8")
    dims, starts = words[: items + 1], words[items + 1 : 2 * items + 2]
    lengths64, documents = words[2 * items + 2 : 3 * items + 2], words[3 * items + 2 :]
    if not np.array_equal(dims, np.arange(items + 1)):
        raise DataError(
            f"`dim offsets` of {path} must be 0..{items}, but are not; the items must have one dim."
        )
    if items and (int(lengths64.min()) < 0 or int(lengths64.max()) > np.iinfo(np.int32).max):
        raise DataError(
            f"`sizes` of {path} must be between 0 and {np.iinfo(np.int32).max}, but span "
            f"{int(lengths64.min())}..{int(lengths64.max())}; the index is damaged."
        )
    if int(starts[-1]) != bin_size // dtype.itemsize:
        raise DataError(
            f"`data offsets` of {path} must end at {bin_size // dtype.itemsize} elements, but end at "
            f"{int(starts[-1])}; index and .bin do not belong together."
        )
    if items and (int(starts.min()) < 0 or int(starts.max()) > bin_size):
        raise DataError(
            f"`data offsets` of {path} must lie inside the .bin, but do not; the index is damaged."
        )
    lengths, offsets = lengths64.astype("<i4"), starts[:-1] * dtype.itemsize
    _check_documents(path, documents, items)
    check_sequences(path, lengths, offsets, dtype.itemsize, bin_size)
    return IndexTables(dtype, lengths, offsets, documents, None, bin_size // dtype.itemsize)


def _header(path: Path, index: np.ndarray, header: struct.Struct, kind: bytes) -> tuple[int, ...]:
    """Check the magic and the version of a header; return the fields after them."""
    if index.size < header.size:
        raise DataError(
            f"`{path}` must hold a header of {header.size} bytes, but is {index.size} bytes long; "
            "the file is cut short, preprocess the corpus again."
        )
    magic, version, *fields = header.unpack(bytes(index[: header.size]))
    if magic != kind:
        raise DataError(f"`{path}` must start with {kind!r}, but starts with {magic!r}; give an .idx.")
    if version != 1:
        raise DataError(f"`version` of {path} must be 1, but is {version}; the header is damaged or foreign.")
    return tuple(fields)


def _dtype_of_code(path: Path, code: int) -> np.dtype:
    if code in FLOAT_CODES:
        raise DataError(
            f"`element code` of {path} must name an integer type, but is {code} ({FLOAT_CODES[code]}); "
            "token ids are integers, so this is not a token dataset."
        )
    if code not in DTYPE_CODES:
        raise DataError(f"`element code` of {path} must be 1..5 or 8, but is {code}; the header is damaged.")
    return DTYPE_CODES[code]


def check_file_size(path: Path, size: int, sequences: int, entries: int, multimodal: bool = False) -> None:
    """Raise DataError unless `size` is right for an MMIDIDX file of this many sequences and entries.

    entries: of the document index.
    """
    plain = MMIDIDX_HEADER.size + 12 * sequences + 8 * entries
    with_modes = plain + sequences
    if size == (with_modes if multimodal else plain):
        return
    counts = f"{sequences} sequences and {entries} document entries"
    if not multimodal and size == with_modes:
        raise DataError(
            f"`{path}` must be {plain} bytes for {counts}, but is {size}: it seems to hold a mode for each "
            "sequence, as of images and text, which no training here reads; preprocess the text alone."
        )
    if multimodal and size == plain:
        raise DataError(
            f"`{path}` must be {with_modes} bytes for {counts} with modes, but is {size}: it has no modes; "
            "open it as a dataset of text."
        )
    expected = with_modes if multimodal else plain
    raise DataError(
        f"`{path}` must be {expected} bytes for {counts}, but is {size}; the file is cut short, extended or "
        "its header is damaged."
    )


def _check_documents(path: Path, document_index: np.ndarray, sequences: int) -> None:
    if document_index.size == 0:
        raise DataError(f"`document index` of {path} must have at least one entry, but is empty.")
    first, last = int(document_index[0]), int(document_index[-1])
    if first != 0 or last != sequences:
        raise DataError(
            f"`document index` of {path} must run from 0 to {sequences}, but runs from {first} to {last}; "
            "the index is damaged."
        )
    for begin in range(0, document_index.size - 1, _CHUNK):
        part = document_index[begin : begin + _CHUNK + 1]
        wrong = part[1:] < part[:-1]
        if wrong.any():
            at = begin + 1 + int(np.argmax(wrong))
            raise DataError(
                f"`document index` of {path} must never fall, but entry {at} is {int(document_index[at])} "
                f"after {int(document_index[at - 1])}; the index is damaged."
            )


def check_sequences(
    path: Path, lengths: np.ndarray, offsets: np.ndarray, itemsize: int, bin_size: int
) -> None:
    """Raise DataError unless lengths are >= 0, offsets are their running sum, and the total is `bin_size`."""
    total = 0
    for begin in range(0, lengths.size, _CHUNK):
        part = lengths[begin : begin + _CHUNK]
        if int(part.min()) < 0:
            at = begin + int(np.argmax(part < 0))
            raise DataError(
                f"`length` of sequence {at} in {path} must be at least 0, but is {int(lengths[at])}; "
                "the index is damaged."
            )
        ends = np.cumsum(part, dtype=np.int64) * itemsize + total
        stored = offsets[begin : begin + _CHUNK]
        wrong = stored[1:] != ends[:-1]
        if int(stored[0]) != total or wrong.any():
            at = begin if int(stored[0]) != total else begin + 1 + int(np.argmax(wrong))
            expected = total if at == begin else int(ends[at - begin - 1])
            raise DataError(
                f"`offset` of sequence {at} in {path} must be {expected}, the sum of the lengths before it, "
                f"but is {int(offsets[at])}; the index is damaged."
            )
        total = int(ends[-1])
        if total > bin_size:
            break
    if total != bin_size:
        raise DataError(
            f"`{path.with_suffix('.bin')}` must be {total} bytes by the lengths of its index, but is "
            f"{bin_size}; one of the two files is cut short or belongs to another dataset."
        )
