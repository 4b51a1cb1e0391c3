"""The dataset that was analyzed: `{metric}_dataset.json` beside the analyzer's files.

An index lists samples by number, and a number means a sample only for one dataset, sequence length, seed,
split and number of epochs. So megazero's analyzer records these, and a training compares them with its own.
DeepSpeed's analyzer records nothing, so its indexes cannot be checked.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megazero.data.blended import SampleDataset
from megazero.data.cache import cache_key
from megazero.data.indexed.reader import content_hash
from megazero.data.sources import sources
from megazero.errors import DataError
from megazero.regular_file import read_regular

FORMAT = "megazero-analyzed-1"
_IGNORED = frozenset({"mask_prob"})  # text is analyzed unmasked
_SUFFIX = re.compile(
    r"_(index_to_sample(_percentile_merged)?|index_to_metric|sample_to_metric|metric_value)$"
)


@dataclass(frozen=True)
class AnalyzedDataset:
    """The dataset that sample numbers refer to.

    key: hash of `description` in hex. samples: the number of samples. description: everything that the
    samples and their order depend on, as JSON: hashes of the datasets (the same for copies of their files),
    sequence length, seed, split, number of epochs.
    """

    key: str
    samples: int
    description: Mapping[str, object]

    @classmethod
    def of(cls, dataset: SampleDataset) -> AnalyzedDataset:
        """Describe a built dataset, a split of `megazero.data.build.build_datasets`."""
        copies = {indexed.fingerprint: content_hash(indexed) for indexed in sources(dataset)}
        description = _plain_items(dataset.description, copies)
        return cls(cache_key(description), len(dataset), description)

    def check(self, other: AnalyzedDataset, name: str) -> None:
        """Raise DataError unless this is `other`, the dataset of a run. name: of the index, for messages."""
        if self.key == other.key and self.samples == other.samples:
            return
        differing = _differences("", self.description, other.description)
        shown = "; ".join(f"{what} was {then} and is {now}" for what, then, now in differing[:3])
        raise DataError(
            f"`{name}` must be of the dataset that is trained on ({other.key}), but is an index of another "
            f"dataset ({self.key}): {shown or f'{self.samples} samples and {other.samples}'}; analyze with "
            "the flags of the training (data, split, seed, sequence length, epochs), or correct those."
        )

    def to_json(self, metric: Mapping[str, object] | None = None) -> str:
        """The text of the JSON file at `facts_path`. metric: the metric's identity, which is recorded too."""
        return json.dumps({"format": FORMAT, **vars(self), "metric": metric}, indent=1)


def facts_path(prefix: str | Path) -> Path:
    """The path of the JSON beside an index: `a/m_dataset.json` for the prefix `a/m_index_to_sample`."""
    prefix = Path(prefix)
    return prefix.with_name(_SUFFIX.sub("", prefix.name) + "_dataset.json")


def dataset_of(prefix: str | Path) -> AnalyzedDataset | None:
    """The dataset that an index was made of; None if it is not recorded, as for DeepSpeed's own files.

    prefix: path of an index file without .bin or .idx. Raises DataError for a JSON that cannot be read.
    """
    path = facts_path(prefix)
    try:
        content = json.loads(read_regular(path))
        if content["format"] != FORMAT:
            raise ValueError(f"its format is {content['format']}")
        return AnalyzedDataset(str(content["key"]), int(content["samples"]), dict(content["description"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(
            f"`{path}` must say in format {FORMAT} which dataset was analyzed, but does not ({error}); "
            "analyze the dataset again."
        ) from error


def _plain(value: object, copies: Mapping[str, str]) -> object:
    """A description without ignored items, with fingerprints replaced by `copies`, hashes without times."""
    if isinstance(value, Mapping):
        return _plain_items(value, copies)
    if isinstance(value, (list, tuple)):
        return [_plain(item, copies) for item in value]
    return copies.get(value, value) if isinstance(value, str) else value


def _plain_items(values: Mapping[str, object], copies: Mapping[str, str]) -> dict[str, object]:
    return {key: _plain(value, copies) for key, value in values.items() if key not in _IGNORED}


def _differences(where: str, then: object, now: object) -> list[tuple[str, object, object]]:
    """(path, value then, value now) of the leaves in which two descriptions differ."""
    if isinstance(then, Mapping) and isinstance(now, Mapping):
        keys = sorted({*then, *now})
        return [
            difference
            for key in keys
            for difference in _differences(f"{where}.{key}" if where else key, then.get(key), now.get(key))
        ]
    if isinstance(then, list) and isinstance(now, list) and len(then) == len(now):
        pairs = enumerate(zip(then, now, strict=True))
        return [leaf for i, (a, b) in pairs for leaf in _differences(f"{where}[{i}]", a, b)]
    return [] if then == now else [(where, then, now)]
