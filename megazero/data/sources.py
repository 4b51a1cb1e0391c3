"""The files under a built dataset, whatever wraps them: whether they change, and what is in them."""

from __future__ import annotations

from collections.abc import Iterator
from os.path import abspath

from megazero.data.blended import SampleDataset
from megazero.data.indexed.reader import IndexedDataset, file_hashes


def sources(dataset: SampleDataset) -> Iterator[IndexedDataset]:
    """The indexed datasets under a built one; none under random data."""
    for part in getattr(dataset, "datasets", ()):
        yield from sources(part)
    indexed = getattr(dataset, "indexed", None)
    if indexed is not None:
        yield indexed


def changed_files(dataset: SampleDataset) -> list[str]:
    """A clause for each file that is not what it was when it was opened: `/d/x.bin is 8 bytes, and was 16`.

    It costs a look at each file's size and times, and finds nothing with `--no-verify-data`.
    """
    return [clause for indexed in sources(dataset) for clause in indexed.guard.changed()]


def contents(dataset: SampleDataset) -> list[dict[str, str | None]]:
    """The contents of the files: for each dataset its absolute `prefix`, and the hashes of `file_hashes`.

    They depend neither on the layout, nor on the number of samples, nor on where the files are.
    """
    by_prefix = {abspath(indexed.prefix): indexed for indexed in sources(dataset)}
    return [{"prefix": prefix, **file_hashes(indexed)} for prefix, indexed in by_prefix.items()]
