"""DeepSpeed's names for indexed datasets, over `megazero.data.indexed`."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from megazero.data.indexed.format import dtype_for_vocab
from megazero.data.indexed.reader import IndexedDataset
from megazero.data.indexed.writer import IndexedDatasetWriter
from megazero.errors import ConfigError


def index_file_path(prefix_path: str | os.PathLike[str]) -> str:
    """Return the path of a dataset's index, which holds the sizes."""
    return f"{os.fspath(prefix_path)}.idx"


def data_file_path(prefix_path: str | os.PathLike[str]) -> str:
    """Return the path of a dataset's tokens."""
    return f"{os.fspath(prefix_path)}.bin"


class MMapIndexedDataset(IndexedDataset):
    """A memory-mapped dataset; ``[i]`` is a sequence, and ``[i:j]`` a list of them.

    Args:
        path: the path of its files without ``.idx`` and ``.bin``.
        skip_warmup: has no effect; nothing is read ahead.
    """

    supports_prefetch = False

    def __init__(self, path: str | os.PathLike[str], skip_warmup: bool = False):
        super().__init__(os.fspath(path))

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return type(self), (self.prefix,)

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self.get(i) for i in range(*index.indices(len(self)))]
        return super().__getitem__(index)

    @property
    def sizes(self) -> np.ndarray:
        """The number of tokens of each sequence."""
        return self.lengths

    def size(self, index: int) -> int:
        """Return the number of tokens of a sequence."""
        return int(self.lengths[index])

    @property
    def doc_idx(self) -> np.ndarray:
        """The index of each document's first sequence, and last the number of sequences."""
        return self.document_index

    def get_doc_idx(self) -> np.ndarray:
        """Return `doc_idx`."""
        return self.document_index

    @staticmethod
    def exists(path: str | os.PathLike[str]) -> bool:
        """Whether both files exist."""
        return all(Path(name(path)).exists() for name in (index_file_path, data_file_path))


class MMapIndexedDatasetBuilder:
    """Writes a dataset, which can be read after `finalize`.

    Args:
        out_file: the path of the tokens, which ends in ``.bin``.
        dtype: the dtype of a token.
    """

    def __init__(self, out_file: str | os.PathLike[str], dtype: np.dtype | type | str = np.int64):
        self._writer = IndexedDatasetWriter(os.fspath(out_file).removesuffix(".bin"), dtype)
        self._document: list[np.ndarray] = []

    def add_item(self, tensor: Tensor) -> None:
        """Add a sequence to the current document."""
        self.add_item_numpy(tensor.cpu().numpy())

    def add_items(self, arr_list: Iterable[np.ndarray]) -> None:
        """Add sequences to the current document."""
        for sequence in arr_list:
            self.add_item_numpy(sequence)

    def add_item_numpy(self, np_array: np.ndarray) -> None:
        """Add a sequence to the current document."""
        self._document.append(np.asarray(np_array).reshape(-1))

    def end_document(self) -> None:
        """End the current document."""
        self._writer.add_document(self._document)
        self._document = []

    def merge_file_(self, another_file: str | os.PathLike[str]) -> None:
        """Append the documents of another dataset.

        Raises:
            ConfigError: the current document has not been ended.
        """
        if self._document:
            raise ConfigError("`end_document` must be called before `merge_file_`, but was not; call it")
        self._writer.append_dataset(os.fspath(another_file))

    def finalize(self, index_file: str | os.PathLike[str]) -> None:
        """End the current document and write the index.

        Raises:
            ConfigError: `index_file` is not beside the tokens.
        """
        if Path(index_file) != Path(index_file_path(self._writer.prefix)):
            raise ConfigError(
                f"`index_file` must be {index_file_path(self._writer.prefix)}, but is {index_file}; give "
                "both files the same name"
            )
        if self._document:
            self.end_document()
        self._writer.close()


def make_builder(
    out_file: str | os.PathLike[str], impl: str, vocab_size: int | None = None
) -> MMapIndexedDatasetBuilder:
    """Make a builder whose tokens have the dtype of `vocab_size`, see `dtype_for_vocab`; by default int32.

    Raises:
        ConfigError: `impl` is not mmap.
    """
    _require_mmap(impl)
    return MMapIndexedDatasetBuilder(
        out_file, np.int32 if vocab_size is None else dtype_for_vocab(vocab_size)
    )


def make_dataset(path: str | os.PathLike[str], impl: str, skip_warmup: bool = False) -> MMapIndexedDataset:
    """Open a dataset.

    Raises:
        ConfigError: `impl` is neither mmap nor infer.
    """
    _require_mmap("mmap" if impl == "infer" else impl)
    return MMapIndexedDataset(path)


def dataset_exists(path: str | os.PathLike[str], impl: str) -> bool:
    """Whether the files of a dataset exist."""
    return MMapIndexedDataset.exists(path)


def _require_mmap(impl: str) -> None:
    if impl != "mmap":
        raise ConfigError(f"`impl` must be mmap, but is {impl}; write the dataset anew with mmap")
