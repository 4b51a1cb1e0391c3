"""Adds the checksum sidecar to a dataset that has none."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from megazero.data.files import whole_file
from megazero.data.indexed.checksum import BlockChecksum, Sidecar, hash_bytes
from megazero.data.indexed.reader import map_file, open_indexed
from megazero.errors import DataError


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
    index, checksum = map_file(dataset.path_idx), BlockChecksum()
    checksum.update(dataset.tokens.view(np.uint8))
    sidecar = Sidecar(index.size, hash_bytes(index), checksum.size, tuple(checksum.blocks()))
    if changed := dataset.guard.changed():
        raise DataError(
            f"`{dataset.prefix}` must stay as it is while its checksums are computed, but {changed[0]}; wait "
            "until it is whole, then try again."
        )
    with whole_file(dataset.path_sum) as file:
        file.write(sidecar.to_json().encode())
    return True
