"""The files under a built dataset, whatever wraps them: whether they change, and what is in them."""

from __future__ import annotations

from collections.abc import Iterator
from os.path import abspath

from megazero.data.blended import BlendedDataset, SampleDataset
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


def contents(dataset: SampleDataset) -> list[dict[str, str | int | None]]:
    """The contents of the files: for each dataset its absolute `prefix`, and the hashes of `file_hashes`.

    They depend neither on the layout, nor on the number of samples, nor on where the files are. `named` says
    how often a blend names the dataset; versions that do not say it mixed the dataset with itself.
    """
    by_prefix = {abspath(indexed.prefix): indexed for indexed in sources(dataset)}
    named = dict.fromkeys(by_prefix, 1)
    if isinstance(dataset, BlendedDataset):
        for part, times in zip(dataset.datasets, dataset.mentions, strict=True):
            for indexed in sources(part):
                named[abspath(indexed.prefix)] = max(times, named[abspath(indexed.prefix)])
    return [{"prefix": p, **file_hashes(indexed), "named": named[p]} for p, indexed in by_prefix.items()]
