"""Sample indexes that Megatron has prepared: three .npy files for a GPT, or one for a BERT."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from megazero.data.index_build import GPTIndex
from megazero.errors import DataError


def prepared_index(files: Sequence[str], sequences: int, prefix: str) -> tuple[GPTIndex, int]:
    """Read a prepared GPT index; return the index and its number of epochs.

    Args:
        files: paths of the document index, the sample index and the shuffle index.
        sequences: the number of sequences in the train split.
        prefix: the dataset's prefix, for messages.

    Raises:
        DataError: a file cannot be read, or the documents are not those of whole epochs.
    """
    index = GPTIndex(*map(read_prepared, files))
    epochs, rest = divmod(len(index.document_index), max(1, sequences))
    if rest or not epochs:
        raise DataError(
            f"the prepared index {files[0]} must have each of the {sequences} sequences of the train split "
            f"of {prefix} as often, but has {len(index.document_index)} in all; give the `--split` that it "
            "is of."
        )
    return index, epochs


def check_prepared(fault: str | None, samples: int, num_samples: int | None, prefix: str) -> None:
    """Refuse an index with a fault, or with fewer samples than the training needs. Raises DataError."""
    if fault is None and samples < (num_samples or 1):
        fault = f"its {samples} samples are fewer than the {num_samples} of the training"
    if fault is not None:
        raise DataError(f"the prepared index does not fit {prefix}: {fault}.")


def read_prepared(path: str) -> np.ndarray:
    """Map the array in a .npy file. Raises DataError if it cannot be read, or holds Python objects."""
    try:
        array: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise DataError(
            f"a prepared index must be a .npy file, but {path} cannot be read ({error})."
        ) from error
    return array


def digest_of(*arrays: np.ndarray) -> str:
    """A hash of the arrays of an index."""
    digest = hashlib.blake2b(digest_size=16)
    for array in arrays:
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()
