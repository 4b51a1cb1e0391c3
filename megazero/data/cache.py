"""A cache of index arrays on disk, keyed by the content that they were built from.

A key is the hash of a description with the dataset's fingerprint and every parameter of the build, so a
changed dataset or setting has another key, and a stale index is never found. An entry is one `.npy` per array
and a small JSON with shapes, types and checksums. An entry that does not agree with its JSON (foreign, cut
short, damaged), or that cannot be an index of this dataset (`index_check`), is rebuilt with a warning.
Nothing here unpickles.

Many processes may need the same entry at once, on a shared disk. One of them builds it, under a lease beside
it (`.lock`), and the others wait for it. The lease is a file whose holder touches it now and then, so it
works on any file system and between hosts, and a holder that was killed loses it after some minutes. Nothing
depends on it: an entry is written under temporary names and renamed into place, the JSON last. Builds are
deterministic, so if two processes build after all, equal bytes replace equal bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from filelock import SoftFileLease, Timeout

from megazero.data.build_report import ProgressLog, say_once_per_host
from megazero.data.files import whole_file
from megazero.data.indexed.checksum import hash_bytes
from megazero.data.indexed.guard import FileState
from megazero.regular_file import open_regular, read_regular

_FORMAT = "megazero-index-1"


_LEASE_SECONDS = 180.0  # longer than network file systems keep what they know of a file
_LONGEST_LEASE = 86_400.0
_POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Streamed:
    """An array that is built block by block. blocks: consecutive parts of its first dim, to be read once."""

    shape: tuple[int, ...]
    dtype: np.dtype
    blocks: Iterable[np.ndarray]


Parts = Iterator[tuple[str, np.ndarray | Streamed]]
"""Names and arrays of an entry. Each is stored before the next one is built."""


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
    build: Callable[[], Mapping[str, np.ndarray] | Parts],
    fault: Callable[[Mapping[str, np.ndarray]], str | None],
    seconds: float = 0.0,
) -> dict[str, np.ndarray]:
    """The arrays that `build()` returns: loaded if the cache has a valid entry, else built and stored.

    directory: the folder of the cache, None for no cache; name: a readable prefix of the file names;
    description: everything that the arrays depend on; names: the arrays' names; fault: returns why loaded
    arrays cannot be the result of `build`, None if they can; seconds: the time that a build may take. Loaded
    arrays are read-only maps. A cache that cannot be written causes a warning.
    """
    if directory is None:
        return _in_memory(build)
    stem = Path(directory) / f"{name}-{cache_key(description)}"
    before = FileState.of(_manifest_path(stem))
    try:
        return _load(stem, description, names, fault)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (_Unusable, OSError) as error:
        warnings.warn(f"index cache {stem}.json is not usable ({error}); it is rebuilt.", stacklevel=2)
    try:
        if _stored_by_one(stem, description, build, before, seconds):
            return {name: _map(stem, name) for name in names}
        return _load(stem, description, names, fault)
    except (_Unusable, OSError) as error:
        reason = getattr(error, "strerror", None) or error
        warnings.warn(
            f"index cache {directory} cannot be written ({reason}); the index stays in "
            "memory. Set `data_cache_path` to a writable directory.",
            stacklevel=2,
        )
    return _in_memory(build)


def _stored_by_one(
    stem: Path,
    description: Mapping[str, object],
    build: Callable[[], Mapping[str, np.ndarray] | Parts],
    before: FileState | None,
    seconds: float,
) -> bool:
    """Build and store an entry, unless another process does, which is waited for; whether it was this one.

    before: the state of the entry's JSON when it was found to be missing or not usable.
    """
    stem.parent.mkdir(parents=True, exist_ok=True)
    # A long shuffle does not let the lease be touched.
    duration = min(_LEASE_SECONDS + 10 * seconds, _LONGEST_LEASE)
    lease = SoftFileLease(f"{stem}.lock", lease_duration=duration)
    log = ProgressLog(say_once_per_host, f"waiting for the index {stem.name}")
    while FileState.of(_manifest_path(stem)) == before:
        try:
            with lease.acquire(blocking=False):
                if FileState.of(_manifest_path(stem)) == before:
                    _store(stem, description, build())
                    return True
        except Timeout:
            log.tell(f"another process builds it and holds {stem}.lock")
            time.sleep(_POLL_SECONDS)
    return False


def _in_memory(build: Callable[[], Mapping[str, np.ndarray] | Parts]) -> dict[str, np.ndarray]:
    return {
        name: np.concatenate([*part.blocks]) if isinstance(part, Streamed) else part
        for name, part in _pairs(build())
    }


def _pairs(built: Mapping[str, np.ndarray] | Parts) -> Iterable[tuple[str, np.ndarray | Streamed]]:
    return built.items() if isinstance(built, Mapping) else built


def _manifest_path(stem: Path) -> Path:
    return stem.with_name(f"{stem.name}.json")


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
    try:
        manifest = json.loads(read_regular(_manifest_path(stem)))
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
            array = _map(stem, name)
        except FileNotFoundError as error:
            raise _Unusable(f"array {name} is missing") from error
        except MemoryError:  # not the fault of the file
            raise
        except Exception as error:
            # numpy parses a text header, in which foreign bytes can raise many kinds of errors.
            raise _Unusable(f"array {name} is not a .npy file: {error}") from error
        if array.dtype.hasobject or _record(array) != record:
            raise _Unusable(f"array {name} differs from its description")
        arrays[name] = array
    wrong = fault(arrays)
    if wrong is not None:
        raise _Unusable(f"its checksums are right, but {wrong}")
    return arrays


def _map(stem: Path, name: str) -> np.ndarray:
    path = _array_path(stem, name)
    open_regular(path).close()
    array: np.ndarray = np.load(path, allow_pickle=False, mmap_mode="r")
    return array.view(np.ndarray)


def _store(
    stem: Path, description: Mapping[str, object], built: Mapping[str, np.ndarray] | Parts
) -> None:
    records = {name: _write(_array_path(stem, name), part) for name, part in _pairs(built)}
    manifest = {
        "format": _FORMAT,
        "key": cache_key(description),
        "description": dict(description),
        "arrays": records,
    }
    text = json.dumps(manifest, indent=1).encode()
    with whole_file(_manifest_path(stem)) as file:
        file.write(text)


def _write(path: Path, part: np.ndarray | Streamed) -> dict[str, object]:
    """Write a .npy file; return its record."""
    if isinstance(part, np.ndarray):
        with whole_file(path) as file:
            np.save(file, part, allow_pickle=False)
        return _record(part)
    digest = hashlib.blake2b(digest_size=16)
    header = {"descr": part.dtype.str, "fortran_order": False, "shape": part.shape}
    with whole_file(path) as file:
        np.lib.format.write_array_header_1_0(file, header)
        for block in part.blocks:
            digest.update(np.ascontiguousarray(block).data)
            file.write(np.ascontiguousarray(block).data)
    return {"shape": list(part.shape), "dtype": part.dtype.str, "blake2b": digest.hexdigest()}
