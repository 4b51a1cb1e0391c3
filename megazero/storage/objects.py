"""Objects below one URL: read whole or by ranges, listed, and put so that a lost race is noticed.

The library is obstore, which repeats requests that fail on the way. Keys and passwords come from the
environment, as the library of each service reads it; no message shows them.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from megazero.errors import StorageError
from megazero.storage.urls import Url

if TYPE_CHECKING:
    from obstore import GetOptions, ObjectMeta, PutResult, UpdateVersion
    from obstore.store import ObjectStore, RetryConfig

RETRIES = 10
PATIENCE = timedelta(minutes=3)
"""How often, and for how long, a request that fails on the way is repeated."""

_CODE = re.compile(r"<Code>(\w+)</Code>")
_STATUS = re.compile(r"status code: (\d{3} [A-Za-z ]+)")
# A class of obstore's errors -> what it means, and what to do.
_MEANINGS = MappingProxyType(
    {
        "PermissionDeniedError": (
            "access is denied",
            "check the keys in the environment and what they allow",
        ),
        "UnauthenticatedError": (
            "the keys are refused",
            "check that those in the environment have not expired",
        ),
        "FileNotFoundError": ("there is no such object", "check the URL"),
    }
)


class MissingObjectError(StorageError):
    """There is no object of this name."""


class PassingError(StorageError):
    """The store does not answer, or its answer is cut: another attempt may mend it."""


class LostRaceError(StorageError):
    """Another writer has put an object first, or has replaced it since it was read."""


@dataclass(frozen=True, order=True)
class Item:
    """An object in a list: its name below the URL that was listed, its size in bytes, and its tag."""

    name: str
    size: int
    tag: str


class Objects:
    """The objects below a URL, by names relative to it.

    All methods raise StorageError, in one sentence that names the object. They may be called on any thread.
    """

    def __init__(self, url: Url, store: ObjectStore | None = None):
        self.url = url
        self._store = _open(url) if store is None else store

    def tag(self, name: str) -> str:
        """The tag of an object's present content, for `swap`. Raises MissingObjectError."""
        import obstore

        with self._errors(name):
            return _version(obstore.head(self._store, name))

    def item(self, name: str) -> Item:
        """The size and the tag of an object. Raises MissingObjectError."""
        import obstore

        with self._errors(name):
            meta = obstore.head(self._store, name)
        return Item(name, meta["size"], meta["e_tag"] or "")

    def read(self, name: str) -> tuple[bytes, str]:
        """The content of an object and its tag, for `swap`. Raises MissingObjectError."""
        import obstore

        with self._errors(name):
            answer = obstore.get(self._store, name)
            return bytes(answer.bytes()), _version(answer.meta)

    def ranges(self, name: str, starts: Sequence[int], ends: Sequence[int]) -> list[memoryview]:
        """Bytes [start, end) for each pair; near ones are fetched together, and all at the same time."""
        import obstore

        with self._errors(name):
            pieces = [memoryview(p) for p in obstore.get_ranges(self._store, name, starts=starts, ends=ends)]
        for start, end, piece in zip(starts, ends, pieces, strict=True):
            if len(piece) != end - start:
                raise _shorter(self.url / name, end)
        return pieces

    def piece(self, name: str, start: int, end: int, tag: str) -> memoryview:
        """Bytes [start, end) of an object. Raises LostRaceError if its tag is not `tag` any more."""
        import obstore
        from obstore.exceptions import PreconditionError

        options: GetOptions = {"range": (start, end)}
        if tag and not tag.startswith("W/"):  # a weak tag is equal to none
            options["if_match"] = tag
        with self._errors(name):
            try:
                piece = memoryview(obstore.get(self._store, name, options=options).bytes())
            except PreconditionError:
                raise LostRaceError(
                    f"`{self.url / name}` must stay as it is while it is read, but was replaced."
                ) from None
        if len(piece) != end - start:
            raise _shorter(self.url / name, end)
        return piece

    def download(self, name: str, path: Path) -> Item:
        """Write an object's content into a new file, in pieces; returns what was read. Raises OSError."""
        import obstore

        with self._errors(name):
            answer = obstore.get(self._store, name)
        meta = answer.meta
        with open(path, "xb") as file:
            pieces = iter(answer.stream(min_chunk_size=8 << 20))
            while True:
                with self._errors(name):  # without the disk's own errors
                    piece = next(pieces, None)
                if piece is None:
                    return Item(name, meta["size"], meta["e_tag"] or "")
                file.write(piece)

    def names(self, below: str = "", *, deep: bool = True) -> Iterator[Item]:
        """All objects whose names begin with `below` and a slash (none: all), in the store's order.

        deep: also those with further slashes behind it.
        """
        import obstore

        with self._errors(below):
            here, store = below or None, self._store
            near = None if deep else [obstore.list_with_delimiter(store, here)["objects"]]
            for batch in obstore.list(store, here) if near is None else near:
                for meta in batch:
                    yield Item(meta["path"], meta["size"], meta["e_tag"] or "")

    def put(self, name: str, content: bytes | Path) -> str:
        """Put an object, whole or not at all, replacing what there is; returns its tag."""
        import obstore

        with self._errors(name):
            return _version(obstore.put(self._store, name, content))

    def create(self, name: str, content: bytes) -> str:
        """Put an object that is not there yet; returns its tag. LostRaceError if there is one.

        A content of its own for each writer tells a lost answer from a lost race: an object that is there
        already and has this content is this call's.
        """
        import obstore
        from obstore.exceptions import AlreadyExistsError

        with self._errors(name):
            try:
                return _version(obstore.put(self._store, name, content, mode="create"))
            except AlreadyExistsError:
                return self._mine(name, content)

    def swap(self, name: str, content: bytes, tag: str) -> str:
        """Replace an object whose tag is still `tag`; returns the new tag. LostRaceError as in `create`."""
        import obstore
        from obstore.exceptions import PreconditionError

        e_tag, _, version = tag.partition(" ")
        known: UpdateVersion = {"e_tag": e_tag, "version": version} if version else {"e_tag": e_tag}
        with self._errors(name):
            try:
                return _version(obstore.put(self._store, name, content, mode=known))
            except (PreconditionError, FileNotFoundError):
                return self._mine(name, content)

    def delete(self, names: Sequence[str]) -> None:
        """Delete objects; one that is not there is no error."""
        import obstore

        with self._errors(names[0] if names else ""), contextlib.suppress(FileNotFoundError):
            if names:
                obstore.delete(self._store, list(names))

    def _mine(self, name: str, content: bytes) -> str:
        try:
            there, tag = self.read(name)
        except MissingObjectError:
            there, tag = b"", ""
        if there != content:
            raise LostRaceError(
                f"`{self.url / name}` must be written by one run, but another wrote it first."
            )
        return tag

    @contextlib.contextmanager
    def _errors(self, name: str) -> Iterator[None]:
        """Turn the library's errors, which are pages long, into a sentence."""
        try:
            yield
        except StorageError:
            raise
        except Exception as error:  # obstore's errors have no base but Exception in common with OSErrors
            if not isinstance(error, OSError) and not type(error).__module__.startswith("obstore"):
                raise
            raise _sentence(self.url / name, error) from None


def _version(meta: PutResult | ObjectMeta) -> str:
    """An object's tag, and behind a space its version, by which Google Cloud Storage tells contents apart."""
    return " ".join(filter(None, [meta["e_tag"], meta["version"]]))


def _shorter(url: Url, end: int) -> StorageError:
    return PassingError(f"`{url}` must have {end} bytes, but is shorter; it may be damaged.")


def _sentence(url: Url, error: Exception) -> StorageError:
    text = str(error)
    code, status = _CODE.search(text), _STATUS.search(text)
    if code is not None and code[1] == "NoSuchBucket":
        return StorageError(f"`{url}` must be in a bucket that exists, but {url.bucket} does not; create it.")
    name = type(error).__name__
    if status is not None and status[1][:3] in ("401", "403"):  # also where keys are asked for
        name = "PermissionDeniedError"
    why, remedy = _MEANINGS.get(name, ("the store does not answer", "try again"))
    kind = StorageError if name in _MEANINGS else PassingError
    detail = ", ".join(match[1].strip() for match in (status, code) if match is not None)
    kind = MissingObjectError if isinstance(error, FileNotFoundError) else kind
    return kind(f"`{url}` must be within reach, but {why}{detail and f' ({detail})'}; {remedy}.")


def _open(url: Url) -> ObjectStore:
    try:
        from obstore.store import from_url
    except ImportError as error:
        raise StorageError(
            f"`obstore` must be installed to reach {url}, but is not; run: pip install 'megazero[objects]'"
        ) from error
    address, options = _of_profile(url) if url.scheme == "msc" else (str(url), {})
    retries: RetryConfig = {"max_retries": RETRIES, "retry_timeout": PATIENCE}
    try:
        return from_url(address, retry_config=retries, **options)
    except Exception as error:
        if not type(error).__module__.startswith("obstore"):
            raise
        reason = str(error).partition("\n")[0]
        raise StorageError(f"`{url}` must be a URL that can be opened, but is not: {reason}.") from None


def _of_profile(url: Url) -> tuple[str, dict[str, Any]]:
    """The address and the options of an object at msc://, by the files of multi-storage-client."""
    try:
        from multistorageclient.config import StorageClientConfig
    except ImportError as error:
        raise StorageError(
            f"`multi-storage-client` must be installed to reach {url}, but is not; run: pip install "
            "multi-storage-client"
        ) from error
    profile = ((StorageClientConfig.read_msc_config()[0] or {}).get("profiles") or {}).get(url.bucket) or {}
    provider = profile.get("storage_provider") or {}
    scheme = {"s3": "s3", "gcs": "gs", "azure": "az"}.get(str(provider.get("type")))
    if scheme is None:
        raise StorageError(
            f"`{url}` must name a profile of multi-storage-client for S3, Google Cloud Storage or Azure, but "
            f"{url.bucket} is none; add it to its file, or give the address itself."
        )
    given = provider.get("options") or {}
    keys = (profile.get("credentials_provider") or {}).get("options") or {}
    if scheme != "s3":
        given, keys = {"base_path": given.get("base_path")}, {}
    options = {
        "endpoint": given.get("endpoint_url"),
        "region": given.get("region_name"),
        "access_key_id": keys.get("access_key"),
        "secret_access_key": keys.get("secret_key"),
        "session_token": keys.get("session_token"),
    }
    address = f"{scheme}://{str(given.get('base_path', '')).strip('/')}/{url.key}".rstrip("/")
    if str(options["endpoint"]).startswith("http:"):
        options["client_options"] = {"allow_http": True}
    return address, {name: value for name, value in options.items() if value}
