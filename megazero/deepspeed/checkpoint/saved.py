"""A saved state of an engine, in our format or in DeepSpeed's: tensors, and what stands beside them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from megazero.checkpoint.folder import candidates
from megazero.checkpoint.part import WEIGHT, Key, Part, Source
from megazero.checkpoint.reader import CheckpointReader
from megazero.deepspeed.checkpoint.plain import decode
from megazero.deepspeed.moe.experts import older_names
from megazero.errors import CheckpointError
from megazero.formats.deepspeed.files import TagFiles, find_files, inventory
from megazero.formats.deepspeed.folder import ForeignFolder, Groups
from megazero.formats.deepspeed.vectors import Scale
from megazero.optim.loss_scaler import LossScaler, ScalerState

STATE = "state"
"""Kind of tensors that belong to options, schedules and the script."""


@dataclass(frozen=True)
class EngineCounters:
    """How far an engine has come; checkpoints store it. See `EngineState` for the meaning."""

    global_steps: int
    global_samples: int
    micro_steps: int
    skipped_steps: int


class Renamed:
    """A source whose tensors have other names.

    Args:
        source: the source.
        names: name there -> name here; others stay.

    Attributes:
        shapes: the shapes of everything that it holds.
    """

    def __init__(self, source: CheckpointReader | ForeignFolder, names: Mapping[str, str]):
        self._source = source
        here = {key: Key(names.get(key.name, key.name), key.kind) for key in source.shapes}
        self._there = {own: key for key, own in here.items()}
        self.shapes = {own: source.shapes[key] for key, own in here.items()}

    def tensor(self, key: Key) -> Tensor:
        """A whole tensor."""
        return self._source.tensor(self._there[key])

    def read(self, parts: Iterable[Part]) -> None:
        """Fill the memory of parts; see `Source`."""
        self._source.read([replace(part, key=self._there[part.key]) for part in parts])


_: type[Source] = Renamed


Tensors = CheckpointReader | ForeignFolder | Renamed
"""Sources that also give whole tensors."""


@dataclass(frozen=True)
class SavedNames:
    """The names in a saved state that need another treatment than most.

    Attributes:
        frozen: the parameters that were not trained.
        buffers: the buffers.
        shared: other name of a parameter -> the name that its tensors have.
        left_out: parameters that were left out on purpose.
    """

    frozen: Collection[str] = ()
    buffers: Collection[str] = ()
    shared: Mapping[str, str] = field(default_factory=dict)
    left_out: Collection[str] = ()


@dataclass(frozen=True)
class SavedBeside:
    """The values beside the tensors of a saved state; each is made when it is asked for.

    Attributes:
        progress: the counters; given the micro-batches of a step.
        options: the options of each parameter group.
        scaler: the loss scale for a scaler; None if nothing fits it.
        schedule: the state of the learning rate schedule; None if there was none.
        client: the script's own values.
    """

    progress: Callable[[int], EngineCounters]
    options: Callable[[], Sequence[Mapping[str, Any]]]
    scaler: Callable[[LossScaler], ScalerState | None]
    schedule: Callable[[], Mapping[str, Any] | None]
    client: Callable[[], dict[str, Any]]


@dataclass(frozen=True)
class Saved:
    """A saved state.

    Attributes:
        where: its folder, for messages.
        source: its tensors.
        updates: updates so far; None if no optimizer was saved.
        beside: the values beside its tensors.
        names: names that need another treatment than most.
        sparse: whether a parameter without moments is one that had no gradients yet.
    """

    where: Path
    source: Tensors
    updates: int | None
    beside: SavedBeside
    names: SavedNames
    sparse: bool = False

    def renamed(self, model: nn.Module) -> Saved:
        """The same, with the names that an older release gave to experts as the model has them."""
        names = older_names(model, {key.name for key in self.source.shapes})
        if not names or isinstance(self.source, Renamed):
            return self
        return replace(self, source=Renamed(self.source, names))

    def weight_names(self) -> set[str]:
        """The names of all parameters and buffers, but for other names of tied ones."""
        return {key.name for key in self.source.shapes if key.kind == WEIGHT} - set(self.names.shared)

    def fill_missing_moments(self, wanted: Sequence[Part]) -> list[Part]:
        """Zero the moments that no gradient has made yet; return the parts that are still to be read."""
        if not self.sparse:
            return list(wanted)
        kinds = {key.kind for key in self.source.shapes}
        left = []
        for part in wanted:
            if part.key.kind in kinds and part.key.kind != WEIGHT and part.key not in self.source.shapes:
                part.tensor.zero_()
            else:
                left.append(part)
        return left


def open_saved(folder: Path, groups: Groups = (), *, optimizer: bool = True) -> Saved:
    """The saved state in the folder of a tag.

    Args:
        folder: the folder.
        groups: the parameters of the optimizer's groups; see `ForeignFolder`.
        optimizer: whether more than weights is wanted.

    Raises:
        CheckpointError: there is none, or it cannot be read.
    """
    if files := find_files(folder):
        return _foreign(files, groups, optimizer)
    if newest := next(iter(candidates(folder).folders), None):
        return _ours(CheckpointReader(newest), folder)
    raise CheckpointError(
        f"`{folder}` must hold a checkpoint, but has {inventory(folder)}; check the path and the tag"
    )


def _ours(reader: CheckpointReader, folder: Path) -> Saved:
    facts = reader.facts
    if facts.get("kind") != "module":
        raise CheckpointError(
            f"`{reader.folder}` must be of a module, but is of {facts.get('kind')}; load it with `--load`"
        )
    states = {key.name: reader.tensor(key) for key in reader.shapes if key.kind == STATE}
    return Saved(
        folder,
        reader,
        facts["updates"],
        SavedBeside(
            lambda accumulation: EngineCounters(**facts["progress"]),
            partial(decode, facts["options"], states),
            lambda scaler: ScalerState(**facts["scaler"]),
            partial(decode, facts["schedule"], states),
            partial(decode, facts["client"], states),
        ),
        SavedNames(
            facts.get("frozen", ()),
            facts.get("buffers", ()),
            facts.get("shared", {}),
            facts.get("left_out", ()),
        ),
    )


def _foreign(files: TagFiles, groups: Groups, optimizer: bool) -> Saved:
    source = ForeignFolder(files, groups, optimizer=optimizer)
    facts, counts = source.facts, source.facts.counts

    def progress(accumulation: int) -> EngineCounters:
        done = counts.steps
        return EngineCounters(done, counts.samples, done * accumulation, counts.skipped)

    return Saved(
        files.folder,
        source,
        counts.updates,
        SavedBeside(
            progress,
            lambda: facts.options,
            lambda scaler: None if facts.scale is None else _scaler_state(facts.scale, scaler),
            lambda: facts.schedule,
            lambda: dict(facts.client),
        ),
        SavedNames(source.frozen, source.buffers, source.shared),
        sparse=True,
    )


def _scaler_state(scale: Scale, scaler: LossScaler) -> ScalerState | None:
    """DeepSpeed's loss scale as a scaler here holds it; it counts good steps since the last overflow."""
    if not scaler.searches:
        return None
    left = scaler.initial().hysteresis_left if scale.hysteresis is None else int(scale.hysteresis)
    return ScalerState(scale.scale, scale.since_growth(getattr(scaler, "window", 1)), left)
