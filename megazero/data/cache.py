"""A cache of index arrays on disk, keyed by the content that they were built from.

A key is the hash of a description with the dataset's fingerprint and every parameter of the build, so a
changed dataset or setting has another key, and a stale index is never found. An entry is one `.npy` per array
and a small JSON with shapes, types and checksums. An entry that does not agree with its JSON (foreign, cut
short, damaged), or that cannot be an index of this dataset (`index_check`), is rebuilt with a warning.
Nothing here unpickles.

Many processes may need the same entry at once, on a shared disk. Each one that does not find the entry builds
it, writes it under temporary names and renames these into place, the JSON last. Builds are deterministic, so
the last writer replaces equal bytes with equal bytes. That costs a few milliseconds per process and needs no
lock; every kind of lock fails somewhere: flock is unreliable on NFS, and a lock file outlives a killed owner.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from megazero.data.files import whole_file
from megazero.data.indexed.checksum import hash_bytes
from megazero.regular_file import open_regular, read_regular

_FORMAT = "megazero-index-1"


class _Unusable(Exception):
    """An entry exists but must not be used; the message says why."""


def cache_key(description: Mapping[str, object]) -> str:
    """The hex key of a description, a JSON value; the order of its items does not matter."""
    text = json.dumps(description, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def cached_arrays(
    directory: str | Path | None,
    name: str,
    description: Mapping[str, object],
    names: tuple[str, ...],
    build: Callable[[], dict[str, np.ndarray]],
    fault: Callable[[Mapping[str, np.ndarray]], str | None],
) -> dict[str, np.ndarray]:
    """The arrays that `build()` returns: loaded if the cache has a valid entry, else built and stored.

    directory: the folder of the cache, None for no cache; name: a readable prefix of the file names;
    description: everything that the arrays depend on; names: the arrays' names; fault: returns why loaded
    arrays cannot be the result of `build`, None if they can. Loaded arrays are read-only maps. A cache that
    cannot be written causes a warning.
    """
    if directory is None:
        return build()
    stem = Path(directory) / f"{name}-{cache_key(description)}"
    try:
        return _load(stem, description, names, fault)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (_Unusable, OSError) as error:
        warnings.warn(f"index cache {stem}.json is not usable ({error}); it is rebuilt.", stacklevel=2)
    arrays = build()
    try:
        _store(stem, description, arrays)
    except OSError as error:
        warnings.warn(
            f"index cache {directory} cannot be written ({error.strerror or error}); the index stays in "
            "memory. Set `data_cache_path` to a writable directory.",
            stacklevel=2,
        )
    return arrays


def _array_path(stem: Path, name: str) -> Path:
    return stem.with_name(f"{stem.name}-{name}.npy")


def _record(array: np.ndarray) -> dict[str, object]:
    raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return {"shape": list(array.shape), "dtype": array.dtype.str, "blake2b": hash_bytes(raw)}


def _load(
    stem: Path,
    description: Mapping[str, object],
    names: tuple[str, ...],
    fault: Callable[[Mapping[str, np.ndarray]], str | None],
) -> dict[str, np.ndarray]:
    """Load an entry. Raises FileNotFoundError if there is none, _Unusable if it must not be used."""
    manifest_path = stem.with_name(stem.name + ".json")
    try:
        manifest = json.loads(read_regular(manifest_path))
        records = dict(manifest["arrays"])
        if manifest["format"] != _FORMAT or manifest["key"] != cache_key(description):
            raise _Unusable("it belongs to another format or dataset")
        if sorted(records) != sorted(names):
            raise _Unusable(f"it holds the arrays {sorted(records)} and not {sorted(names)}")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _Unusable(f"its description is damaged: {error}") from error
    arrays = {}
    for name, record in records.items():
        try:
            path = _array_path(stem, name)
            open_regular(path).close()
            array = np.load(path, allow_pickle=False, mmap_mode="r")
        except FileNotFoundError as error:
            raise _Unusable(f"array {name} is missing") from error
        except MemoryError:  # not the fault of the file
            raise
        except Exception as error:
            # numpy parses a text header, in which foreign bytes can raise many kinds of errors.
            raise _Unusable(f"array {name} is not a .npy file: {error}") from error
        if not isinstance(array, np.ndarray) or array.dtype.hasobject or _record(array) != record:
            raise _Unusable(f"array {name} differs from its description")
        arrays[name] = array.view(np.ndarray)
    wrong = fault(arrays)
    if wrong is not None:
        raise _Unusable(f"its checksums are right, but {wrong}")
    return arrays


def _store(stem: Path, description: Mapping[str, object], arrays: Mapping[str, np.ndarray]) -> None:
    for name, array in arrays.items():
        with whole_file(_array_path(stem, name)) as file:
            np.save(file, array, allow_pickle=False)
    manifest = {
        "format": _FORMAT,
        "key": cache_key(description),
        "description": dict(description),
        "arrays": {name: _record(array) for name, array in arrays.items()},
    }
    text = json.dumps(manifest, indent=1).encode()
    with whole_file(stem.with_name(stem.name + ".json")) as file:
        file.write(text)
