"""`prefix.sum`: an optional sidecar that reveals damage which the index format itself cannot show.

A flipped bit in the tokens, or a document boundary that has moved between its neighbours, leaves a
well-formed dataset. The writer therefore adds a small JSON beside the two files: their sizes, a BLAKE2b hash
of the `.idx` (checked at every open, as the file is short) and a CRC-32 for each 4 MiB block of the `.bin`
(checked on demand, or by `guard` when a block is first used). Megatron ignores the sidecar, and a dataset
without one can be opened. The extra `fast` installs ISA-L's CRC-32, which is several times as fast as zlib's.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from megazero.errors import DataError
from megazero.regular_file import read_regular
from megazero.storage.urls import Url

try:
    from isal.isal_zlib import crc32
except ImportError:
    from zlib import crc32

BLOCK = 4 << 20
FORMAT = "megazero-sum-1"


@dataclass
class BlockChecksum:
    """Streaming CRC-32 of consecutive 4 MiB blocks. `size` is the number of bytes seen so far."""

    size: int = 0
    _done: list[int] = field(default_factory=list)
    _open: int = 0

    def update(self, data: bytes | memoryview | np.ndarray) -> None:
        bytes_of = data.data if isinstance(data, np.ndarray) else memoryview(data)
        view = bytes_of.cast("B") if len(data) else memoryview(b"")
        at = 0
        while at < len(view):
            room = BLOCK - self.size % BLOCK
            piece = view[at : at + room]
            self._open = crc32(piece, self._open)
            self.size += len(piece)
            at += len(piece)
            if self.size % BLOCK == 0:
                self._done.append(self._open)
                self._open = 0

    def blocks(self) -> list[int]:
        """The CRC-32 of every block so far; the last block may be short."""
        return [*self._done, self._open] if self.size % BLOCK else list(self._done)


@dataclass(frozen=True)
class Sidecar:
    """The content of `prefix.sum`.

    idx_hash: BLAKE2b in hex; bin_blocks: a CRC-32 per 4 MiB of the `.bin`; mask_blocks: of a `.mask`.
    """

    idx_size: int
    idx_hash: str
    bin_size: int
    bin_blocks: tuple[int, ...]
    mask_blocks: tuple[int, ...] | None = None

    def to_json(self) -> str:
        idx = {"size": self.idx_size, "blake2b": self.idx_hash}
        content = {"size": self.bin_size, "block": BLOCK, "crc32": _hex(self.bin_blocks)}
        mask = {} if self.mask_blocks is None else {"mask": {"crc32": _hex(self.mask_blocks)}}
        return json.dumps({"format": FORMAT, "idx": idx, "bin": content, **mask})

    @classmethod
    def load(cls, path: Path) -> Sidecar | None:
        """The sidecar at `path`, or None if there is none; DataError if it cannot be understood."""
        try:
            text = read_regular(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise DataError(f"`{path}` must be readable, but is not ({error.strerror}).") from error
        try:
            content = json.loads(text)
            if content["format"] != FORMAT or content["bin"]["block"] != BLOCK:
                raise ValueError("unknown format or block size")
            blocks, idx = _numbers(content["bin"]["crc32"]), content["idx"]
            mask = _numbers(content["mask"]["crc32"]) if "mask" in content else None
            sidecar = cls(int(idx["size"]), str(idx["blake2b"]), int(content["bin"]["size"]), blocks, mask)
            if len(blocks) != -(-sidecar.bin_size // BLOCK):
                raise ValueError(f"{len(blocks)} block checksums for {sidecar.bin_size} bytes")
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise DataError(
                f"`{path}` must be a checksum file of format {FORMAT}, but is not ({error}); delete it if "
                "the dataset was made by another tool, else make the dataset again."
            ) from error
        return sidecar

    def check_index(self, path: Path | Url, idx_hash: str, idx_size: int, bin_size: int) -> None:
        """Raise DataError unless both files have the recorded sizes and the `.idx` the recorded hash."""
        for suffix, size, recorded in ((".idx", idx_size, self.idx_size), (".bin", bin_size, self.bin_size)):
            if size != recorded:
                raise DataError(
                    f"`{path.with_suffix(suffix)}` must be {recorded} bytes by its checksum file {path}, but "
                    f"is {size}; make the dataset again, or delete {path.name} if another tool rewrote it."
                )
        if idx_hash != self.idx_hash:
            raise DataError(
                f"`{path.with_suffix('.idx')}` must hash to {self.idx_hash} by {path}, but hashes to "
                f"{idx_hash}; the index is damaged: make the dataset again, or delete {path.name} if another "
                "tool rewrote it."
            )


def _hex(crcs: tuple[int, ...]) -> str:
    return np.array(crcs, ">u4").tobytes().hex()


def _numbers(crcs: str) -> tuple[int, ...]:
    return tuple(np.frombuffer(bytes.fromhex(crcs), ">u4").tolist())


@dataclass(frozen=True)
class TokenBlocks:
    """The blocks of a `.bin` or `.mask`, and their recorded checksums.

    path: the file; recorded: a CRC-32 per block; content: its bytes, uint8; offsets: int64 [S], the first
    byte of each sequence in the `.bin`; document_index: int64 [documents + 1], the first sequence of each
    document; scale: bytes of the `.bin` to a byte of `content`.
    """

    path: Path | Url
    recorded: tuple[int, ...]
    content: np.ndarray
    offsets: np.ndarray
    document_index: np.ndarray
    scale: int = 1

    def __len__(self) -> int:
        return len(self.recorded)

    def check(self, number: int) -> None:
        """Raise DataError, naming the damaged documents, unless block `number` has its recorded checksum."""
        begin, end = number * BLOCK, min((number + 1) * BLOCK, self.content.size)
        actual, recorded = crc32(self.content[begin:end]), self.recorded[number]
        if actual != recorded:
            what = "mask is" if self.path.name.endswith(".mask") else "tokens are"
            where = self._documents(begin * self.scale, end * self.scale)
            raise DataError(
                f"`{self.path}` must have CRC-32 {recorded:08x} in bytes {begin}..{end}, but has "
                f"{actual:08x}; the {what} damaged ({where}): make the dataset again, or delete "
                f"{self.path.with_suffix('.sum').name} if another tool rewrote it."
            )

    def covering(self, begins: np.ndarray, ends: np.ndarray) -> list[int]:
        """The numbers of the blocks for bytes begins[i]..ends[i] of the `.bin`, any i; both int64 [n]."""
        begins, ends = begins // self.scale, ends // self.scale
        filled = ends > begins
        pairs = zip((begins[filled] // BLOCK).tolist(), ((ends[filled] - 1) // BLOCK).tolist(), strict=True)
        return sorted({number for first, last in set(pairs) for number in range(first, last + 1)})

    def _documents(self, begin: int, end: int) -> str:
        """The names of the documents with bytes in begin..end."""
        first = int(np.searchsorted(self.offsets, begin, "right")) - 1
        last = int(np.searchsorted(self.offsets, end, "left")) - 1
        numbers = np.searchsorted(self.document_index, [first, last], "right") - 1
        one, other = numbers.tolist()
        return f"document {one}" if one == other else f"documents {one} to {other}"


def hash_bytes(data: np.ndarray) -> str:
    """BLAKE2b (16 bytes, hex) of a uint8 array, block by block so that a mapped file is not copied."""
    digest = hashlib.blake2b(digest_size=16)
    for begin in range(0, data.size, BLOCK):
        digest.update(data[begin : begin + BLOCK].data)
    return digest.hexdigest()
