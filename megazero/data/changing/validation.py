"""Validation data in several sets, each with a loss of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from megazero.config.compat.blends import expanded
from megazero.config.tree.config import Config
from megazero.data.blended import SampleDataset, parse_blend
from megazero.data.build import Datasets, Sizes
from megazero.errors import DataError


class ValidationSet(SampleDataset):
    """A dataset whose samples may fail to be read: a training does not end by what it only measures.

    Then other samples take their place, and `fault` says what is wrong.
    """

    def __init__(self, name: str, dataset: SampleDataset):
        self.name, self.dataset, self.datasets = name, dataset, [dataset]
        self.fault: str | None = None
        self._stand_in = dataset.batch([0])

    def __len__(self) -> int:
        return len(self.dataset)

    def batch(self, indices: Sequence[int] | np.ndarray) -> dict[str, np.ndarray]:
        """The samples `indices` stacked."""
        try:
            return self.dataset.batch(indices)
        except DataError as error:
            self.fault = str(error)
            return {key: np.repeat(array, len(indices), axis=0) for key, array in self._stand_in.items()}

    @property
    def description(self) -> dict[str, object]:
        return self.dataset.description

    @property
    def padding_share(self) -> float:
        return self.dataset.padding_share

    @property
    def notes(self) -> tuple[str, ...]:
        return self.dataset.notes


class ValidationSets(SampleDataset):
    """Several sets, which are evaluated one by one; `notes` names those that cannot be."""

    name = "valid"

    def __init__(self, sets: Sequence[ValidationSet], faults: Sequence[str]):
        self.datasets, self._faults = sets, faults

    def __len__(self) -> int:
        return min(map(len, self.datasets))

    def batch(self, indices: Sequence[int] | np.ndarray) -> dict[str, np.ndarray]:
        """The samples `indices` of the first set."""
        return self.datasets[0].batch(indices)

    @property
    def description(self) -> dict[str, object]:
        return {"kind": "sets", "datasets": {one.name: one.description for one in self.datasets}}

    @property
    def padding_share(self) -> float:
        return self.datasets[0].padding_share

    @property
    def notes(self) -> tuple[str, ...]:
        return (*self._faults, *(note for one in self.datasets for note in one.notes))


Agree = Callable[[str | None], str | None]
"""A fault on this rank, or None -> that of the first rank with one."""


def validation_sets(
    config: Config, samples: int, build: Callable[[Config, Sizes], Datasets], agree: Agree
) -> ValidationSets | None:
    """A set of so many samples for each dataset of the validation data, whatever its weight; None without.

    Raises DataError if `validation_set_names` are not as many as the sets, or if no set can be read.
    """
    data, field = config.data, "valid_data_path" if config.data.valid_data_path else "data_path"
    words = expanded(data.valid_data_path, "valid") or expanded(data.data_path, "train")
    paths = list(dict.fromkeys(path for _, path in parse_blend(words, must_exist=False))) if words else []
    names = list(data.validation_set_names) or [Path(path).name for path in paths]
    if len(set(names)) < len(paths) and not data.validation_set_names:
        names = paths
    if len(names) != len(paths) or len(set(names)) < len(names):
        raise DataError(
            f"`validation_set_names` must be {len(paths)} different names, one for each dataset, but are "
            f"{' '.join(names)}; correct them."
        )
    sets, faults = [], []
    for name, path in zip(names, paths, strict=True):
        own = data.model_copy(update={field: (path,)})
        fault = None
        try:
            dataset = build(config.model_copy(update={"data": own}), (0, samples, 0))[1]
            if dataset is None:
                raise DataError(f"`{path}` has no samples for it")
            sets.append(ValidationSet(name, dataset))
        except DataError as error:
            fault = str(error)
        fault = agree(fault)
        if fault is not None:
            sets = [one for one in sets if one.name != name]
            faults.append(f"warning: there will be no loss of validation set {name}: {fault}")
    if faults and not sets:
        raise DataError(f"the validation data must have a set that can be read, but have none; {faults[0]}")
    return ValidationSets(sets, faults) if sets else None
