"""A cache of index arrays on disk, keyed by the content that they were built from.

A key is the hash of a description with the dataset's fingerprint and every parameter of the build, so a
changed dataset or setting has another key, and a stale index is never found. An entry is one `.npy` per array
and a small JSON with shapes, types and checksums. An entry that does not agree with its JSON (foreign, cut
short, damaged), or that cannot be an index of this dataset (`index_check`), is rebuilt with a warning.
Nothing here unpickles.

Many processes may need the same entry at once, on a shared disk. One builds it, and the others wait for it:
it holds a lease, a file that it touches now and then, so that it works between hosts on any file system, and
a holder that was killed loses it. Nothing depends on it: an entry is written under temporary names and
renamed into place, the JSON last, and builds are deterministic, so that of two processes that build after all
the last one replaces equal bytes with equal bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from filelock import SoftFileLease, Timeout

from megazero.data.build_report import ProgressLog, say_once_per_host
from megazero.data.files import whole_file
from megazero.data.indexed.checksum import hash_bytes
from megazero.data.indexed.guard import FileState
from megazero.regular_file import open_regular, read_regular

_FORMAT = "megazero-index-1"
_LEASE_SECONDS, _LONGEST_LEASE = 180.0, 86_400.0  # network file systems remember a file's times for a minute
_POLL_SECONDS = 0.2


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
    seconds: float = 0.0,
) -> dict[str, np.ndarray]:
    """The arrays that `build()` returns: loaded if the cache has a valid entry, else built and stored.

    directory: the folder of the cache, None for no cache; name: a readable prefix of the file names;
    description: everything that the arrays depend on; names: the arrays' names; fault: returns why loaded
    arrays cannot be the result of `build`, None if they can; seconds: the time that a build may take. Loaded
    arrays are read-only maps. A cache that cannot be written causes a warning.
    """
    if directory is None:
        return build()
    stem = Path(directory) / f"{name}-{cache_key(description)}"
    manifest = stem.with_name(f"{stem.name}.json")
    before = FileState.of(manifest)
    try:
        return _load(stem, description, names, fault)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (_Unusable, OSError) as error:
        warnings.warn(f"index cache {stem}.json is not usable ({error}); it is rebuilt.", stacklevel=2)
    # A long shuffle does not let the lease be touched.
    duration = min(_LEASE_SECONDS + 10 * seconds, _LONGEST_LEASE)
    lock = stem.with_name(f"{stem.name}.lock")
    lease, holder, since = SoftFileLease(lock, lease_duration=duration), None, time.monotonic()
    log = ProgressLog(say_once_per_host, f"waiting for the index {stem.name}")
    while FileState.of(manifest) == before:
        try:
            stem.parent.mkdir(parents=True, exist_ok=True)
            held = lease.acquire(blocking=False)
        except Timeout:
            log.tell(f"another process builds it and holds {lock.name}")
            time.sleep(_POLL_SECONDS)
            if FileState.of(lock) != holder:
                holder, since = FileState.of(lock), time.monotonic()
            elif time.monotonic() > since + 1.5 * duration:  # a file without a holder has no lease that ends
                with contextlib.suppress(OSError):
                    lock.unlink()
                return _stored(stem, description, build())
            continue
        except OSError:  # `_stored` says what is wrong
            return _stored(stem, description, build())
        with held:
            if FileState.of(manifest) == before:
                return _stored(stem, description, build())
    return cached_arrays(directory, name, description, names, build, fault, seconds)


def _stored(
    stem: Path, description: Mapping[str, object], arrays: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    try:
        _store(stem, description, arrays)
    except OSError as error:
        warnings.warn(
            f"index cache {stem.parent} cannot be written ({error.strerror or error}); the index stays in "
            "memory. Set `data_cache_path` to a writable directory.",
            stacklevel=3,
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
