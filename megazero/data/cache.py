"""Index arrays kept between runs, keyed by the content they were built from.

A key is the hash of a description that holds the dataset's fingerprint and every parameter of the build, so a
rewritten dataset or another setting leads to another name and a stale index is never found. Each entry is one
`.npy` per array and a small JSON with their shapes, types and checksums; whatever does not agree with it
(foreign, cut short, damaged) is rebuilt with a warning, and so is what agrees but cannot be an index of this
dataset (`index_check`). Nothing here unpickles.

Many processes may want the same entry at once, on a shared disk. Every one that does not find it builds it
privately, writes to temporary names and renames them into place, the JSON last. Builds are deterministic, so
the last writer replaces equal bytes with equal bytes. That wastes a few milliseconds in each process and
needs no lock; every kind of lock fails somewhere: flock is unreliable on NFS, and a lock file outlives a
killed owner.
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
    """An entry that is there but must not be used; the message says why."""


def cache_key(description: Mapping[str, object]) -> str:
    """Hex key of a JSON-able description; independent of the order of its items."""
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
    """The arrays that `build()` returns, from the cache if it has a sound entry, else built and stored.

    directory: where the cache is, None for no cache; name: readable start of the file names; names: the
    arrays' names; description: everything the arrays depend on; fault: says why loaded arrays cannot be what
    `build` returns, None if they can. Loaded arrays are read-only maps. A cache that cannot be written causes
    a warning.
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
    """The entry, or FileNotFoundError if there is none, or _Unusable."""
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
        except MemoryError:  # which says nothing of the file
            raise
        except Exception as error:
            # numpy parses a text header: foreign bytes can trip it in many ways, all of which mean the same.
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
