"""The indexed datasets inside a built dataset: whether their files have changed, and their hashes."""

from __future__ import annotations

from collections.abc import Iterator

from megazero.data.blended import SampleDataset
from megazero.data.indexed.reader import IndexedDataset, file_hashes
from megazero.storage.urls import is_url, place_of


def sources(dataset: SampleDataset) -> Iterator[IndexedDataset]:
    """The indexed datasets inside a built dataset; mock data has none."""
    for part in getattr(dataset, "datasets", ()):
        yield from sources(part)
    indexed = getattr(dataset, "indexed", None)
    if indexed is not None:
        yield indexed


def are_stored(dataset: SampleDataset) -> bool:
    """Whether some of the indexed datasets are in a store, and not in files."""
    return any(is_url(indexed.prefix) for indexed in sources(dataset))


def changed_files(dataset: SampleDataset) -> list[str]:
    """A clause for each file that changed since it was opened, such as `/d/x.bin is 8 bytes, and was 16`.

    Only the size and times of each file are read. With `--no-verify-data` the list is empty.
    """
    return [clause for indexed in sources(dataset) for clause in indexed.guard.changed()]


def _computed(dataset: SampleDataset) -> Iterator[str]:
    """The places of the indexed datasets whose order is computed."""
    for part in getattr(dataset, "datasets", ()):
        yield from _computed(part)
    if getattr(dataset, "is_computed", False):
        yield from (place_of(indexed.prefix) for indexed in sources(dataset))


def contents(dataset: SampleDataset) -> list[dict[str, str | int | None]]:
    """For each indexed dataset: its absolute `prefix`, the hashes of `file_hashes`, `named` and `order`.

    The hashes depend neither on the layout, nor on the number of samples, nor on where the files are.
    `named` is how often a blend names the dataset; older checkpoints lack it, and mixed the dataset with
    itself. `order` is "computed" where it is not Megatron's.
    """
    computed = set(_computed(dataset))
    by_prefix = {place_of(indexed.prefix): indexed for indexed in sources(dataset)}
    named = dict.fromkeys(by_prefix, 1)
    if mentions := getattr(dataset, "mentions", None):
        for part, times in zip(getattr(dataset, "datasets", ()), mentions, strict=True):
            for indexed in sources(part):
                named[place_of(indexed.prefix)] = max(times, named[place_of(indexed.prefix)])
    return [
        {"prefix": p, **file_hashes(i), "named": named[p], "order": "computed" if p in computed else None}
        for p, i in by_prefix.items()
    ]
