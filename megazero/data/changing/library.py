"""The sources of a run's training blend: recognized by content, and opened each alone."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from os.path import realpath

import numpy as np

from megazero.config.compat.blends import part_of, prefix_of
from megazero.config.tree.config import Config
from megazero.data.blended import SampleDataset, parse_blend
from megazero.data.build import Datasets, Sizes, default_cache
from megazero.data.changing.blend import Sources
from megazero.data.changing.history import Share
from megazero.data.indexed.reader import IndexedDataset, content_hash, open_indexed
from megazero.errors import DataError

Build = Callable[[Config, Sizes], Datasets]
"""(configuration, number of samples of each split) -> the three splits."""

_BLOCKS, _BLOCK = 64, 1 << 15  # tokens of a source that are compared with the vocabulary


class Library:
    """Opens sources as a run's settings say.

    build: builds the datasets of a configuration. vocab_size: the number of ids of the run's vocabulary.
    words: the first blend, beside whose first dataset all indexes are kept.
    """

    def __init__(self, config: Config, build: Build, vocab_size: int, words: tuple[str, ...]):
        data = config.data
        self.shared = not data.train_data_path  # with validation and test
        self._build, self._vocab_size = build, vocab_size
        cache = data.data_cache_path or default_cache(words)
        self._config = config.model_copy(update={"data": data.model_copy(update={"data_cache_path": cache})})

    def build(self, words: Iterable[str], sizes: Sizes, key: str | None = None) -> Datasets:
        """Build the three splits with another blend for training, and with a seed of its own for a key."""
        training, data = self._config.training, self._config.data
        if key is not None:
            digest = hashlib.blake2b(f"{training.seed} {key}".encode(), digest_size=4).digest()
            training = training.model_copy(update={"seed": int.from_bytes(digest, "little")})
        data = data.model_copy(update={"data_path" if self.shared else "train_data_path": tuple(words)})
        return self._build(self._config.model_copy(update={"data": data, "training": training}), sizes)

    def make(self, path: str, samples: int, key: str | None) -> SampleDataset:
        """Build at least so many samples of one source."""
        train = self.build((path,), (samples, 0, 0), key)[0]
        if train is None:
            raise DataError(f"`{path}` must give the train split samples, but has none; leave it out.")
        return train

    def shares(
        self, words: Sequence[str], known: Collection[str] = (), opened: Iterable[IndexedDataset] = ()
    ) -> tuple[Share, ...]:
        """The sources of a blend and their weights; those of equal content are one.

        known: sources that the run has had. opened: datasets of its first blend, which are open already.
        Raises DataError for a blend that cannot be trained on.
        """
        by_path = {realpath(indexed.prefix): indexed for indexed in opened}
        weights: dict[str, float] = {}
        paths: dict[str, str] = {}
        for weight, path in parse_blend(words):
            if weight is None:
                raise DataError(f"`{path}` must have a weight in a blend that changes, but has none; add it.")
            indexed = by_path.get(realpath(prefix_of(path))) or open_indexed(prefix_of(path))
            name = self._name(path, indexed)
            if not by_path and name not in known:
                self._check_ids(indexed)
            weights[name] = weights.get(name, 0.0) + weight
            paths.setdefault(name, path)
        if not math.isfinite(sum(weights.values())):
            raise DataError("the weights of a blend must have a finite sum, but have not; make them smaller.")
        return tuple(Share(source=name, path=paths[name], weight=w) for name, w in weights.items())

    def _name(self, path: str, indexed: IndexedDataset) -> str:
        """A hash of the content, with the part and the split that the training reads of it."""
        part = part_of(path, len(indexed))
        which = "" if part == range(len(indexed)) else f"[{part.start}:{part.stop}]"
        split = f"/{self._config.data.split}" if self.shared else ""
        return f"{content_hash(indexed)}{which}{split}"

    def _check_ids(self, indexed: IndexedDataset) -> None:
        """Refuse a dataset of another tokenizer, as far as a part of its ids tells."""
        tokens, size = indexed.tokens, self._vocab_size
        starts = {int(s) for s in np.linspace(0, max(0, len(tokens) - _BLOCK), _BLOCKS)}
        highest = max((int(tokens[s : s + _BLOCK].max()) for s in starts if len(tokens)), default=0)
        most = int(np.iinfo(tokens.dtype).max) if tokens.dtype.kind in "iu" else size
        has = f"the id {highest}" if highest >= size else f"{tokens.dtype.name}, which ends at {most}"
        if highest >= size or most < size - 1:
            raise DataError(
                f"`{indexed.prefix}` must be made with this run's tokenizer, of {size} ids, but has {has}; "
                "preprocess its text again."
            )


_: type[Sources] = Library
