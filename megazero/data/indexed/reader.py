"""Reading an indexed dataset: `open_indexed(prefix)` or `IndexedDataset(prefix)`.

Both files are memory-mapped, so the ranks of a machine share the pages, and opening costs one pass over the
`.idx`, in which everything that the format determines is checked. `validate(full=True)` also compares the
tokens with the checksum sidecar; during a training, `guard` compares them block by block.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from pathlib import Path

import numpy as np

from megazero.data.conversations.mask import block_sums, check_mask, check_values
from megazero.data.files import whole_file
from megazero.data.indexed.checksum import BLOCK, Sidecar, TokenBlocks, hash_bytes
from megazero.data.indexed.format import TNTIDX_MAGIC, IndexTables, parse_mmididx, parse_tntidx
from megazero.data.indexed.guard import FileState, Guard, sums_command
from megazero.errors import DataError
from megazero.regular_file import open_regular
from megazero.storage.cached import Cache
from megazero.storage.dataset import StoredDataset, opened
from megazero.storage.urls import Url

_FULL_HASH_LIMIT = 64 << 20
_SAMPLE_BLOCKS = 64
_SAMPLE_BYTES = 64 << 10


def prefix_path(prefix: str | Path, suffix: str) -> Path:
    """`prefix` + `suffix` as a path; dots inside the prefix stay."""
    return Path(str(prefix) + suffix)


def map_file(path: Path) -> np.ndarray:
    """Map a file's bytes read-only, uint8 [size]; an empty file, which cannot be mapped, gives [0]."""
    try:
        with open_regular(path) as file:
            if os.fstat(file.fileno()).st_size == 0:
                return np.empty(0, dtype=np.uint8)
            return np.memmap(file, dtype=np.uint8, mode="r").view(np.ndarray)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise DataError(
            f"`{path}` must be a readable file, but is not ({reason}); give the dataset's path without its "
            ".idx or .bin suffix."
        ) from error


class IndexedDataset:
    """A memory-mapped indexed dataset of kind MMIDIDX version 1.

    `len(ds)` sequences; `ds[i]` is sequence i as a read-only array view of `dtype`, shape [lengths[i]].

    prefix: path without suffix. multimodal: the index also has a mode for each sequence (which the file
    itself does not say). verify: compare the tokens with the checksum sidecar at open, which reads the whole
    `.bin`; DataError without a sidecar. guarded: detect changes of the files and, with a sidecar, damaged
    blocks when they are first used; see `guard`. Raises DataError if the files contradict the format.

    lengths: int32 [S], tokens of each sequence; offsets: int64 [S], first byte of each sequence in the
    `.bin`; document_index: int64 [documents + 1], first sequence of each document, then S; modes: int8 [S]
    for a multimodal dataset, else None; tokens: `dtype` [total_tokens], all sequences concatenated; mask:
    uint8 [total_tokens], 1 where a token counts in the loss as a label, None if all do; blocks: those of the
    `.bin` and of the `.mask`, with their checksums, none without a sidecar.
    """

    def __init__(
        self,
        prefix: str | Path,
        multimodal: bool = False,
        verify: bool = False,
        guarded: bool = False,
        stored: StoredDataset | None = None,
    ):
        self.prefix = str(prefix)
        path_of = stored.path if stored is not None else partial(prefix_path, prefix)
        self.path_idx, self.path_bin = path_of(".idx"), path_of(".bin")
        self.path_sum, self.path_mask = path_of(".sum"), path_of(".mask")
        self._multimodal = multimodal
        self._guarded = guarded
        self._stored = stored
        # Taken before the files are mapped, so that a change in between is noticed.
        files = {path: FileState.of(path) for path in (self.path_idx, self.path_bin, self.path_mask)}
        self._index = map_file(self.path_idx)
        self._bytes = map_file(self.path_bin) if stored is None else stored.blocks.array
        self._sidecar = Sidecar.load(self.path_sum)
        sums = self.path_sum if stored is None else Url.parse(f"{self.prefix}.sum")  # for messages
        if self._sidecar is not None:
            self._sidecar.check_index(sums, self._idx_hash, self._index.size, self._bytes.size)
        tables = self._parse()
        self.dtype, self.total_tokens = tables.dtype, tables.total_tokens
        self.lengths, self.offsets, self.modes = tables.lengths, tables.offsets, tables.modes
        self.document_index = tables.document_index
        self.tokens = self._bytes.view(tables.dtype)
        self._check_signs()
        self.mask = map_file(self.path_mask) if self.path_mask.exists() else None
        check_mask(self.path_mask, self.mask, self._sidecar, self.total_tokens)
        self.blocks: list[TokenBlocks] = []
        if self._sidecar is not None:
            places, name = (self.offsets, self.document_index), sums.with_suffix
            self.blocks = [TokenBlocks(name(".bin"), self._sidecar.bin_blocks, self._bytes, *places)]
            if self.mask is not None and self._sidecar.mask_blocks is not None:
                mask = name(".mask"), self._sidecar.mask_blocks, self.mask
                self.blocks.append(TokenBlocks(*mask, *places, self.dtype.itemsize))
        if stored is not None:  # whose `.bin` is compared when it arrives
            self.guard = Guard(self.prefix, {}, self.blocks[1:] if guarded else (), stored)
            if stored.compares and self.blocks:
                stored.blocks.check = self.blocks[0].check
        else:
            self.guard = Guard(self.prefix, files, self.blocks) if guarded else Guard(self.prefix, {})
        if verify:
            self._check_bin()

    def _parse(self) -> IndexTables:
        return parse_mmididx(self.path_idx, self._index, self._bytes.size, self._multimodal)

    def _check_signs(self) -> None:
        """Refuse negative ids of type int8 or int16, which are rare: the element code is likely damaged."""
        if self._stored is not None:
            return  # all tokens would be fetched; samples refuse such ids, too
        if self.dtype.kind == "i" and self.dtype.itemsize <= 2 and self.tokens.size and self.tokens.min() < 0:
            raise DataError(
                f"`token ids` of {self.path_bin} must not be negative, but one is {int(self.tokens.min())} "
                f"as {self.dtype.name}; the element code in the index is damaged."
            )

    @property
    def has_checksums(self) -> bool:
        """Whether there is a `prefix.sum`."""
        return self._sidecar is not None

    def __len__(self) -> int:
        return self.lengths.size

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.prefix!r}, sequences={len(self)}, "
            f"documents={self.document_index.size - 1}, tokens={self.total_tokens}, dtype={self.dtype.name})"
        )

    def __reduce__(self) -> tuple[Callable[..., IndexedDataset], tuple[object, ...]]:
        """Pickle the path, so that a worker process maps the files instead of receiving their bytes."""
        if self._stored is not None:
            return open_indexed, (self.prefix, self._multimodal, False, self._guarded, self._stored.cache)
        return type(self), (self.prefix, self._multimodal, False, self._guarded)

    def __getitem__(self, index: int) -> np.ndarray:
        if not -len(self) <= index < len(self):
            raise IndexError(f"`index` must be below {len(self)} sequences of {self.prefix}, but is {index}.")
        return self.get(index % len(self))

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self.get(i) for i in range(len(self)))

    def get(self, index: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """A view of `length` tokens (None: to the end) of sequence `index`, from token `offset` on."""
        if not 0 <= index < len(self):
            raise DataError(f"`index` must be in 0..{len(self) - 1} of {self.prefix}, but is {index}.")
        whole = int(self.lengths[index])
        count = whole - offset if length is None else int(length)
        if not (0 <= offset <= whole and 0 <= count <= whole - offset):
            raise DataError(
                f"`offset` and `length` must stay inside the {whole} tokens of sequence {index} of "
                f"{self.prefix}, but are {offset} and {length}."
            )
        size = self.dtype.itemsize
        begin = int(self.offsets[index]) // size + int(offset)
        with self.guard.using(lambda: (np.array([begin * size]), np.array([(begin + count) * size]))):
            view = self.tokens[begin : begin + count]
            return view if self._stored is None else view.copy()

    def document(self, number: int) -> list[np.ndarray]:
        """The sequences of document `number` in order; an empty list for an empty document."""
        count = self.document_index.size - 1
        if not 0 <= number < count:
            raise DataError(f"`document` must be in 0..{count - 1} of {self.prefix}, but is {number}.")
        begin, end = (int(at) for at in self.document_index[number : number + 2])
        return [self.get(i) for i in range(begin, end)]

    @cached_property
    def _idx_hash(self) -> str:
        return hash_bytes(self._index)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the dataset's content in hex, the key of index caches.

        It covers the whole `.idx`, the size of the `.bin`, and its tokens: all of them up to 64 MiB,
        otherwise 64 samples of 64 KiB and the modification time. Hashing terabytes at every start would take
        minutes, but rebuilding an index takes milliseconds. So it is harmless if the key of a large file
        changes when the file is copied without its times; it must not stay the same after an edit.
        """
        return self._digest(with_time=True)

    def _digest(self, with_time: bool) -> str:
        digest = hashlib.blake2b(digest_size=16)
        digest.update(f"{type(self).__name__} {self._idx_hash} {self._bytes.size} ".encode())
        digest.update((self._mask_hash or "").encode())
        if self._bytes.size <= _FULL_HASH_LIMIT:
            digest.update(self._bin_hash.encode())
        else:
            if with_time:
                version = os.stat(self.path_bin).st_mtime_ns if self._stored is None else self._stored.tag
                digest.update(str(version).encode())
            for sample in self._samples:
                digest.update(sample.data)
        return digest.hexdigest()

    @cached_property
    def _bin_hash(self) -> str:
        if self._stored is None:
            return _hash_of(self._bytes)
        whole = self._bytes.size <= _FULL_HASH_LIMIT
        return hash_bytes(self._stored.blocks.whole() if whole else np.concatenate(self._samples))

    @cached_property
    def _samples(self) -> list[np.ndarray]:
        if self._stored is None:
            return _samples_of(self._bytes)
        begins = _sample_places(self._bytes.size)
        return [np.frombuffer(b, np.uint8) for b in self._stored.blocks.bytes_at(begins, _SAMPLE_BYTES)]

    @cached_property
    def _mask_hash(self) -> str | None:
        return None if self.mask is None else _hash_of(self.mask)

    def validate(self, full: bool = False) -> None:
        """Check the index again and, with `full`, the tokens against the sidecar; DataError on damage.

        Without a sidecar, a full check only refuses negative ids, which no tokenizer produces.
        """
        self._parse()
        if not full:
            return
        if self._sidecar is not None:
            self._check_bin()
        if self.mask is not None:
            check_values(self.path_mask, self.mask)
        if self.dtype.kind == "i" and self.tokens.size:
            for begin in range(0, self.tokens.size, 1 << 22):
                part = self.tokens[begin : begin + (1 << 22)]
                if int(part.min()) < 0:
                    at = begin + int(np.argmin(part))
                    raise DataError(
                        f"`token ids` of {self.path_bin} must not be negative, but token {at} is "
                        f"{int(self.tokens[at])}; the file is damaged."
                    )

    def _check_bin(self) -> None:
        if not self.blocks:
            raise DataError(
                f"`{self.path_sum}` must exist to verify the tokens of {self.prefix}, but does not; open "
                f"without `verify`, or write it with: {sums_command(self.prefix)}"
            )
        for blocks in self.blocks:
            for number in range(len(blocks)):
                blocks.check(number)


def _hash_of(data: np.ndarray) -> str:
    """The hash of bytes up to 64 MiB, else of samples of them."""
    return hash_bytes(data if data.size <= _FULL_HASH_LIMIT else np.concatenate(_samples_of(data)))


def _samples_of(data: np.ndarray) -> list[np.ndarray]:
    return [data[begin : begin + _SAMPLE_BYTES] for begin in _sample_places(data.size)]


def _sample_places(size: int) -> list[int]:
    last = size - _SAMPLE_BYTES
    return [last * number // (_SAMPLE_BLOCKS - 1) for number in range(_SAMPLE_BLOCKS)]


class LegacyIndexedDataset(IndexedDataset):
    """A memory-mapped indexed dataset of the older kind TNTIDX (`--data-impl lazy|cached`)."""

    def _parse(self) -> IndexTables:
        return parse_tntidx(self.path_idx, self._index, self._bytes.size)


def content_hash(dataset: IndexedDataset) -> str:
    """The dataset's `fingerprint` without the modification time: the same for every copy of the files."""
    return dataset._digest(with_time=False)


def file_hashes(dataset: IndexedDataset) -> dict[str, str | None]:
    """Hashes of the content of each file, the same for every copy of the files.

    `idx`: of the `.idx`; `bin`: of the `.bin`, or of samples of it above 64 MiB; `blocks`: of the recorded
    checksums of the `.bin`, None without a sidecar; `mask`: of the `.mask`, as `bin`, None without one.
    """
    blocks = None
    if dataset._sidecar is not None:
        blocks = hash_bytes(np.array(dataset._sidecar.bin_blocks, dtype="<u4").view(np.uint8))
    files = {"idx": dataset._idx_hash, "bin": dataset._bin_hash, "mask": dataset._mask_hash}
    return {**files, "blocks": blocks}


def open_indexed(
    prefix: str | Path,
    multimodal: bool = False,
    verify: bool = False,
    guarded: bool = False,
    cache: Cache | None = None,
) -> IndexedDataset:
    """Open a dataset of either kind, which the first 8 bytes of the `.idx` tell; DataError on damage.

    A dataset at a URL is read block by block through `cache`; without one, it is copied whole.
    """
    prefix, stored = opened(str(prefix), cache, BLOCK if guarded else None)
    path = prefix_path(prefix, ".idx") if stored is None else stored.path(".idx")
    head = map_file(path)[: len(TNTIDX_MAGIC)]
    kind = LegacyIndexedDataset if bytes(head) == TNTIDX_MAGIC else IndexedDataset
    return kind(prefix, multimodal, verify, guarded, stored)


def write_sums(prefix: str | Path) -> bool:
    """Write `prefix.sum`, whole or not at all; False if the dataset has one that agrees with the files.

    The checksums are those of the files as they are now. Raises DataError for a dataset that contradicts the
    format, for a sidecar that does not agree with the files (it is kept), and for files that change
    meanwhile. Raises OSError if the disk refuses.
    """
    dataset = open_indexed(prefix, guarded=True)
    dataset.validate(full=True)
    if dataset.has_checksums:
        return False
    index, tokens = map_file(dataset.path_idx), dataset.tokens.view(np.uint8)
    blocks, mask = block_sums(tokens), None if dataset.mask is None else block_sums(dataset.mask)
    sidecar = Sidecar(index.size, hash_bytes(index), tokens.size, blocks, mask)
    if changed := dataset.guard.changed():
        raise DataError(
            f"`{dataset.prefix}` must stay as it is while its checksums are computed, but {changed[0]}; wait "
            "until it is whole, then try again."
        )
    with whole_file(dataset.path_sum) as file:
        file.write(sidecar.to_json().encode())
    return True
