"""A saved state of an engine, in megazero's format or in DeepSpeed's: tensors and further values."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

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
"""The kind of tensors that belong to options, schedules and the script's values."""


@dataclass(frozen=True)
class EngineCounters:
    """The progress of an engine, which checkpoints store; see `EngineState`."""

    global_steps: int
    global_samples: int
    micro_steps: int
    skipped_steps: int


class Renamed:
    """A source with renamed tensors.

    Args:
        source: the source.
        names: name in the source -> new name; all others stay.

    Attributes:
        shapes: key -> shape.
    """

    def __init__(self, source: CheckpointReader | ForeignFolder, names: Mapping[str, str]):
        self._source = source
        renamed = {key: Key(names.get(key.name, key.name), key.kind) for key in source.shapes}
        self._original = {new: key for key, new in renamed.items()}
        self.shapes = {new: source.shapes[key] for key, new in renamed.items()}

    def tensor(self, key: Key) -> Tensor:
        """Return a whole tensor."""
        return self._source.tensor(self._original[key])

    def read(self, parts: Iterable[Part]) -> None:
        """Read parts; see `Source`."""
        self._source.read([replace(part, key=self._original[part.key]) for part in parts])


_: type[Source] = Renamed


Tensors = CheckpointReader | ForeignFolder | Renamed
"""Sources that can also return whole tensors."""


@dataclass(frozen=True)
class SavedNames:
    """The names in a saved state that are not those of trained parameters.

    Attributes:
        frozen: the parameters that were not trained.
        buffers: the buffers.
        shared: further name of a tied parameter -> the name under which it is saved.
        left_out: the parameters that were excluded on purpose.
    """

    frozen: Collection[str] = ()
    buffers: Collection[str] = ()
    shared: Mapping[str, str] = field(default_factory=dict)
    left_out: Collection[str] = ()


@dataclass(frozen=True)
class SavedValues:
    """The values of a saved state besides model and optimizer tensors, as functions that read them.

    Attributes:
        progress: the number of micro-batches in a step -> the counters.
        options: the options of each parameter group.
        scaler: a loss scaler -> its state; None if the saved state does not fit the scaler.
        schedule: the state of the learning rate schedule; None if there was none.
        client: the script's own values.
    """

    progress: Callable[[int], EngineCounters]
    options: Callable[[], Sequence[Mapping[str, object]]]
    scaler: Callable[[LossScaler], ScalerState | None]
    schedule: Callable[[], Mapping[str, object] | None]
    client: Callable[[], dict[str, object]]


@dataclass(frozen=True)
class Saved:
    """A saved state.

    Attributes:
        where: the folder, for messages.
        source: the tensors.
        updates: the number of updates so far; None if no optimizer was saved.
        beside: the further values.
        names: the names that are not those of trained parameters.
        sparse: whether moments are missing for parameters that had no gradients yet.
    """

    where: Path
    source: Tensors
    updates: int | None
    beside: SavedValues
    names: SavedNames
    sparse: bool = False

    def renamed(self, model: nn.Module) -> Saved:
        """Return the same state with an older release's names of experts replaced by the model's."""
        names = older_names(model, {key.name for key in self.source.shapes})
        if not names or isinstance(self.source, Renamed):
            return self
        return replace(self, source=Renamed(self.source, names))

    def weight_names(self) -> set[str]:
        """Return the names of all parameters and buffers, without further names of tied parameters."""
        return {key.name for key in self.source.shapes if key.kind == WEIGHT} - set(self.names.shared)

    def fill_missing_moments(self, wanted: Sequence[Part]) -> list[Part]:
        """Zero the moments of parameters that had no gradients yet; return the parts still to be read."""
        if not self.sparse:
            return list(wanted)
        kinds = {key.kind for key in self.source.shapes}
        remaining = []
        for part in wanted:
            if part.key.kind in kinds and part.key.kind != WEIGHT and part.key not in self.source.shapes:
                part.tensor.zero_()
            else:
                remaining.append(part)
        return remaining


def open_saved(folder: Path, groups: Groups = (), *, optimizer: bool = True) -> Saved:
    """Open the saved state in the folder of a tag.

    Args:
        folder: the folder.
        groups: the parameters of the optimizer's groups; see `ForeignFolder`.
        optimizer: whether to open more than weights.

    Raises:
        CheckpointError: there is no saved state, or it cannot be read.
    """
    if files := find_files(folder):
        return _open_deepspeed(files, groups, optimizer)
    if newest := next(iter(candidates(folder).folders), None):
        return _open_own(CheckpointReader(newest), folder)
    raise CheckpointError(
        f"`{folder}` must hold a checkpoint, but has {inventory(folder)}; check the path and the tag"
    )


def _open_own(reader: CheckpointReader, folder: Path) -> Saved:
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
        SavedValues(
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


def _open_deepspeed(files: TagFiles, groups: Groups, optimizer: bool) -> Saved:
    source = ForeignFolder(files, groups, optimizer=optimizer)
    facts, counts = source.facts, source.facts.counts

    def progress(accumulation: int) -> EngineCounters:
        steps = counts.steps
        return EngineCounters(steps, counts.samples, steps * accumulation, counts.skipped)

    return Saved(
        files.folder,
        source,
        counts.updates,
        SavedValues(
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
    """Convert DeepSpeed's loss scale to the state of a scaler; None if the scaler's scale is static."""
    if not scaler.searches:
        return None
    left = scaler.initial().hysteresis_left if scale.hysteresis is None else int(scale.hysteresis)
    return ScalerState(scale.scale, scale.since_growth(getattr(scaler, "window", 1)), left)
