"""Writes an indexed dataset that is whole or absent.

Files are written under temporary names in the target's directory; `close` flushes them to disk and renames
`.bin`, `.mask`, `.sum`, and `.idx` last, so that an existing `.idx` means a whole dataset. An exception, a
full disk or a killed process leaves no `.idx`. Lengths and document sizes are spooled to unnamed files, so
memory does not grow with the corpus. A prefix has one writer at a time, and a writer removes the temporary
files that a killed writer left (`data/files.py`).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

import numpy as np

from megazero.data.conversations.mask import MaskWriter
from megazero.data.files import OutputClaim, flush, flush_folder, temporary_path
from megazero.data.indexed.checksum import BlockChecksum, Sidecar
from megazero.data.indexed.format import CODE_OF_DTYPE, MMIDIDX_HEADER, MMIDIDX_MAGIC, normal_dtype
from megazero.data.indexed.reader import open_indexed, prefix_path
from megazero.errors import DataError

_COPY_BYTES = 4 << 20
_INT32_MAX = int(np.iinfo(np.int32).max)


class IndexedDatasetWriter:
    """Writes `prefix.bin`, `prefix.idx` (MMIDIDX version 1) and the checksum sidecar `prefix.sum`.

    If some tokens come with a mask, also `prefix.mask`, in which all tokens without one count.

        with IndexedDatasetWriter(prefix, dtype_for_vocab(50257)) as writer:
            writer.add_document([np.array([11, 12, 13])])

    At the end of the block the dataset is finished and replaces one of the same name; after an exception the
    written files are removed. Raises DataError, naming the path, for a directory that cannot be written or a
    full disk, for ids that do not fit `dtype`, and if another process writes the dataset.
    """

    def __init__(self, prefix: str | Path, dtype: np.dtype | type | str):
        self.prefix = str(prefix)
        self.dtype = normal_dtype(dtype)
        self.sequences = 0
        self.documents = 0
        self._checksum = BlockChecksum()
        self._mask = MaskWriter(lambda: self._open_temporary(".mask"))
        self._finished = False
        self._directory = prefix_path(prefix, ".idx").parent
        self._temporary: list[Path] = []
        self._claim: OutputClaim | None = None
        with self._disk(self._directory):
            self._directory.mkdir(parents=True, exist_ok=True)
            self._claim = OutputClaim(self.prefix)
            self._bin = self._open_temporary(".bin")
            self._lengths = tempfile.TemporaryFile(dir=self._directory)  # noqa: SIM115 (closed by _release)
            self._counts = tempfile.TemporaryFile(dir=self._directory)  # noqa: SIM115 (closed by _release)

    @property
    def tokens(self) -> int:
        """The number of tokens written so far."""
        return self._checksum.size // self.dtype.itemsize

    def add_document(self, sequences: Sequence[np.ndarray]) -> None:
        """Append a document. sequences: arrays of token ids, [n], of any integer type; may be empty."""
        arrays = [np.asarray(sequence).reshape(-1) for sequence in sequences]
        arrays = [array if array.size else np.empty(0, self.dtype) for array in arrays]
        tokens = np.concatenate(arrays) if arrays else np.empty(0, self.dtype)
        self.add_raw(tokens, np.array([a.size for a in arrays], dtype=np.int64), np.array([len(arrays)]))

    def add_raw(
        self,
        tokens: np.ndarray | bytes | bytearray | memoryview,
        lengths: np.ndarray,
        document_lengths: np.ndarray | None = None,
        mask: np.ndarray | None = None,
    ) -> None:
        """Append many documents at once.

        tokens: all token ids, concatenated, as an integer array [n] or as bytes of the dataset's dtype;
        lengths: int [sequences], the tokens of each sequence; document_lengths: int [documents], the
        *sequences* of each document (None: one sequence per document); mask: bool [n], the tokens that count
        in the loss as labels (None: all). Raises DataError, and appends nothing, if the sums disagree or an
        id does not fit the dtype.
        """
        self._require_open()
        data = self._as_elements(tokens)
        lengths = self._as_counts("lengths", lengths, data.size, _INT32_MAX)
        if document_lengths is None:
            document_lengths = np.ones(lengths.size, dtype=np.int64)
        counts = self._as_counts("document_lengths", document_lengths, lengths.size, None)
        with self._disk(self._temporary[0]):
            self._mask.add(mask, data.size, self.tokens)
            self._write_tokens(data.view(np.uint8))
            self._lengths.write(lengths.astype("<i4").data)
            self._counts.write(counts.astype("<i8").data)
        self.sequences += lengths.size
        self.documents += counts.size

    def append_dataset(self, prefix: str | Path) -> None:
        """Append all documents of another dataset, whose tokens are verified if it has checksums.

        If only one of the two datasets has a mask, all tokens of the other count.
        """
        self._require_open()
        other = open_indexed(prefix)
        if other.dtype != self.dtype:
            raise DataError(
                f"`dtype` of {other.prefix} must be {self.dtype.name} like that of {self.prefix}, but is "
                f"{other.dtype.name}; preprocess both with the same tokenizer."
            )
        other.validate(full=other.has_checksums)
        raw = other.tokens.view(np.uint8)
        step = 1 << 20
        with self._disk(self._temporary[0]):
            self._mask.add(other.mask, other.total_tokens, self.tokens)
            for begin in range(0, raw.size, _COPY_BYTES):
                self._write_tokens(raw[begin : begin + _COPY_BYTES])
            for begin in range(0, len(other), step):
                self._lengths.write(other.lengths[begin : begin + step].astype("<i4").data)
            for begin in range(0, other.document_index.size - 1, step):
                counts = np.diff(other.document_index[begin : begin + step + 1])
                self._counts.write(counts.astype("<i8").data)
        self.sequences += len(other)
        self.documents += other.document_index.size - 1

    def close(self) -> None:
        """Finish and publish the dataset; a second call does nothing. Raises DataError if the disk fails."""
        if self._finished:
            return
        try:
            with self._disk(prefix_path(self.prefix, ".idx")):
                flush(self._bin)
                idx_size, idx_hash = self._write_index()
                self._write_sidecar(idx_size, idx_hash)
                self._publish()
        except BaseException:
            self.abort()
            raise
        self._release()

    def abort(self) -> None:
        """Remove the written files; an older dataset of the same name is kept."""
        if not self._finished:
            self._release()

    def __enter__(self) -> IndexedDatasetWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def _as_elements(self, tokens: np.ndarray | bytes | bytearray | memoryview) -> np.ndarray:
        """`tokens` as a contiguous array of the dataset's dtype; DataError if that would change an id."""
        if isinstance(tokens, (bytes, bytearray, memoryview)):
            view = memoryview(tokens).cast("B")
            if view.nbytes % self.dtype.itemsize:
                raise DataError(
                    f"`tokens` must be a multiple of {self.dtype.itemsize} bytes for {self.dtype.name}, but "
                    f"are {view.nbytes}; encode them as {self.dtype.name}."
                )
            return np.frombuffer(view, dtype=self.dtype)
        array = np.asarray(tokens).reshape(-1)
        if array.size == 0:
            return np.empty(0, dtype=self.dtype)
        if array.dtype.kind not in "iu":
            raise DataError(f"`tokens` must be integers, but are {array.dtype}; give token ids.")
        if array.dtype.kind == "i" or not np.can_cast(array.dtype, self.dtype):
            low, high = int(array.min()), int(array.max())
            limit = int(np.iinfo(self.dtype).max)
            if low < 0 or high > limit:
                raise DataError(
                    f"`token id` must be in 0..{limit} to fit {self.dtype.name} in {self.prefix}, but is "
                    f"{low if low < 0 else high}; choose the dtype with `dtype_for_vocab`."
                )
        return np.ascontiguousarray(array, dtype=self.dtype)

    def _as_counts(self, name: str, counts: np.ndarray, total: int, limit: int | None) -> np.ndarray:
        """`counts` as int64 [n]; DataError unless they are integers in 0..limit with the sum `total`."""
        array = np.asarray(counts).reshape(-1)
        if array.size and array.dtype.kind not in "iu":
            raise DataError(f"`{name}` must be integers, but are {array.dtype}; give counts.")
        # Compared before the cast, so that an unsigned 64-bit count cannot wrap into range.
        if array.size and (int(array.min()) < 0 or int(array.max()) > (total if limit is None else limit)):
            raise DataError(
                f"`{name}` must be in 0..{total if limit is None else limit}, but span {int(array.min())}.."
                f"{int(array.max())}; split longer sequences."
            )
        array = array.astype(np.int64)
        if int(array.sum()) != total:
            raise DataError(
                f"`{name}` must add up to {total}, but add up to {int(array.sum())}; give one entry per "
                f"{'sequence' if name == 'lengths' else 'document'}."
            )
        return array

    def _write_tokens(self, data: np.ndarray) -> None:
        if data.size:
            self._bin.write(data.data)
            self._checksum.update(data)

    def _write_index(self) -> tuple[int, str]:
        """Write the temporary `.idx` from the spools; return its size and hash."""
        digest = hashlib.blake2b(digest_size=16)
        size = 0
        with self._open_temporary(".idx") as file:
            header = MMIDIDX_HEADER.pack(
                MMIDIDX_MAGIC, 1, CODE_OF_DTYPE[self.dtype], self.sequences, self.documents + 1
            )
            for part in self._index_parts(header):
                digest.update(part)
                size += len(part)
                file.write(part)
            flush(file)
        return size, digest.hexdigest()

    def _index_parts(self, header: bytes) -> Iterator[bytes]:
        yield header
        for lengths in _spooled(self._lengths, "<i4"):
            yield lengths.tobytes()
        total = 0
        for lengths in _spooled(self._lengths, "<i4"):
            ends = np.cumsum(lengths, dtype=np.int64) * self.dtype.itemsize + total
            yield np.concatenate(([total], ends[:-1])).astype("<i8").tobytes()
            total = int(ends[-1])
        yield np.zeros(1, "<i8").tobytes()
        sequence = 0
        for counts in _spooled(self._counts, "<i8"):
            ends = np.cumsum(counts) + sequence
            yield ends.astype("<i8").tobytes()
            sequence = int(ends[-1])

    def _write_sidecar(self, idx_size: int, idx_hash: str) -> None:
        blocks, mask = tuple(self._checksum.blocks()), self._mask.finish()
        sidecar = Sidecar(idx_size, idx_hash, self._checksum.size, blocks, mask)
        with self._open_temporary(".sum") as file:
            file.write(sidecar.to_json().encode())
            flush(file)

    def _publish(self) -> None:
        """Remove an older dataset of this name, then rename the new files into place, `.idx` last."""
        for suffix in (".idx", ".sum", ".mask"):
            prefix_path(self.prefix, suffix).unlink(missing_ok=True)
        flush_folder(self._directory)
        by_suffix = {path.suffix: path for path in self._temporary}
        for suffix in sorted({*by_suffix} - {".idx"}):
            os.replace(by_suffix[suffix], prefix_path(self.prefix, suffix))
        flush_folder(self._directory)
        os.replace(by_suffix[".idx"], prefix_path(self.prefix, ".idx"))
        flush_folder(self._directory)

    def _open_temporary(self, suffix: str) -> IO[bytes]:
        path = temporary_path(self.prefix, suffix)
        file = open(path, "xb", buffering=1 << 20)  # noqa: SIM115 (closed by _release)
        self._temporary.append(path)
        return file

    def _release(self) -> None:
        self._finished = True
        for file in (self._bin, self._mask, self._lengths, self._counts):
            # On a full disk, flushing the buffer fails again; the first error has been raised already.
            with contextlib.suppress(OSError):
                file.close()
        self._remove_temporary()

    def _remove_temporary(self) -> None:
        for path in self._temporary:
            path.unlink(missing_ok=True)
        if self._claim is not None:
            self._claim.release()

    def _require_open(self) -> None:
        if self._finished:
            raise DataError(f"`{self.prefix}` must still be open to be written, but is closed.")

    @contextlib.contextmanager
    def _disk(self, path: Path) -> Iterator[None]:
        """Turn an OSError into a DataError that names `path`, and remove the written files."""
        try:
            yield
        except OSError as error:
            if hasattr(self, "_counts"):
                self.abort()
            else:
                self._remove_temporary()
            raise DataError(
                f"`{path}` must be writable, but is not ({error.strerror or error}); free space or choose "
                f"another place for {self.prefix}."
            ) from error


def _spooled(file: IO[bytes], dtype: str) -> Iterator[np.ndarray]:
    """Read a spool from its start, in arrays of at most a million elements."""
    file.seek(0)
    while part := file.read(_COPY_BYTES):
        yield np.frombuffer(part, dtype=dtype)
