"""`prefix.sum`: an optional sidecar that lets a reader see damage the index format itself cannot show.

A flipped bit in the tokens, or a document boundary moved inside its neighbours, leaves a perfectly formed
dataset. Our writer therefore leaves a small JSON beside the two files: their sizes, a BLAKE2b hash of the
`.idx` (checked at every open, as it is short) and one CRC-32 per 4 MiB block of the `.bin` (checked on
demand; CRC-32 runs at 2 GB/s here and names the damaged block). Megatron ignores the file, and a dataset
without one opens fine.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from megazero.errors import DataError

BLOCK = 4 << 20
FORMAT = "megazero-sum-1"


@dataclass
class BlockChecksum:
    """Streaming CRC-32 of consecutive 4 MiB blocks. `size` is the number of bytes seen so far."""

    size: int = 0
    _done: list[int] = field(default_factory=list)
    _open: int = 0

    def update(self, data: bytes | memoryview | np.ndarray) -> None:
        view = memoryview(data).cast("B") if len(data) else memoryview(b"")
        at = 0
        while at < len(view):
            room = BLOCK - self.size % BLOCK
            piece = view[at : at + room]
            self._open = zlib.crc32(piece, self._open)
            self.size += len(piece)
            at += len(piece)
            if self.size % BLOCK == 0:
                self._done.append(self._open)
                self._open = 0

    def blocks(self) -> list[int]:
        """CRC of every block so far, the last one possibly short."""
        return [*self._done, self._open] if self.size % BLOCK else list(self._done)


@dataclass(frozen=True)
class Sidecar:
    """Content of `prefix.sum`. idx_hash: BLAKE2b in hex; bin_blocks: one CRC-32 per 4 MiB of the `.bin`."""

    idx_size: int
    idx_hash: str
    bin_size: int
    bin_blocks: tuple[int, ...]

    def to_json(self) -> str:
        return json.dumps(
            {
                "format": FORMAT,
                "idx": {"size": self.idx_size, "blake2b": self.idx_hash},
                "bin": {
                    "size": self.bin_size,
                    "block": BLOCK,
                    "crc32": "".join(f"{crc:08x}" for crc in self.bin_blocks),
                },
            }
        )

    @classmethod
    def load(cls, path: Path) -> Sidecar | None:
        """The sidecar at `path`, or None if there is none; DataError if it cannot be understood."""
        try:
            text = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise DataError(f"`{path}` must be readable, but is not ({error.strerror}).") from error
        try:
            content = json.loads(text)
            if content["format"] != FORMAT or content["bin"]["block"] != BLOCK:
                raise ValueError("unknown format or block size")
            crcs = content["bin"]["crc32"]
            blocks = tuple(int(crcs[at : at + 8], 16) for at in range(0, len(crcs), 8))
            sidecar = cls(
                int(content["idx"]["size"]),
                str(content["idx"]["blake2b"]),
                int(content["bin"]["size"]),
                blocks,
            )
            if len(blocks) != -(-sidecar.bin_size // BLOCK):
                raise ValueError(f"{len(blocks)} block checksums for {sidecar.bin_size} bytes")
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise DataError(
                f"`{path}` must be a checksum file of format {FORMAT}, but is not ({error}); delete it if "
                "the dataset was made by another tool, else make the dataset again."
            ) from error
        return sidecar

    def check_index(self, path: Path, idx_hash: str, idx_size: int, bin_size: int) -> None:
        """Raises DataError unless both files have the recorded sizes and the `.idx` the recorded hash."""
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

    def check_bin(self, path: Path, tokens: np.ndarray) -> None:
        """Raises DataError naming the first damaged 4 MiB block. tokens: uint8 [bytes of `.bin`]."""
        checksum = BlockChecksum()
        for number, begin in enumerate(range(0, tokens.size, BLOCK)):
            checksum.update(tokens[begin : begin + BLOCK])
            found = checksum.blocks()[-1]
            if found != self.bin_blocks[number]:
                raise DataError(
                    f"`{path.with_suffix('.bin')}` must have CRC-32 {self.bin_blocks[number]:08x} in bytes "
                    f"{begin}..{min(begin + BLOCK, tokens.size)}, but has {found:08x}; the tokens are "
                    f"damaged; make the dataset again, or delete {path.name} if another tool rewrote it."
                )


def hash_bytes(data: np.ndarray) -> str:
    """BLAKE2b (16 bytes, hex) of a uint8 array, taken in blocks so that a mapped file is not copied."""
    digest = hashlib.blake2b(digest_size=16)
    for begin in range(0, data.size, BLOCK):
        digest.update(memoryview(data[begin : begin + BLOCK]))
    return digest.hexdigest()
