"""Models that validate a checkpoint's `state.json`, which any program or version may have written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import astuple
from pathlib import Path
from typing import TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from megazero.checkpoint.manifest import STATE, parse
from megazero.config.steps import BEGINNING, Progress
from megazero.config.training_plan import LrLengths
from megazero.data.changing.history import History
from megazero.train.step.spikes import Recent
from megazero.train.step.stability import RunningMoments, Stability
from megazero.train.step.state import TrainState

PRETRAINING = "pretraining"
"""The kind of checkpoint that `snapshot` saves. Other kinds have only weights, or a user's own module."""

_Facts = TypeVar("_Facts", bound=BaseModel)
SavedConfig = dict[str, dict[str, object] | None]


class _FactsModel(BaseModel):
    # Ignore what later versions add.
    model_config = ConfigDict(
        frozen=True, strict=True, extra="ignore", allow_inf_nan=False, protected_namespaces=()
    )


class MomentsFacts(_FactsModel):
    """The fields of `RunningMoments`."""

    mean: float
    variance: NonNegativeFloat


class StabilityFacts(_FactsModel):
    """The fields of `Stability`."""

    updates: NonNegativeInt
    lowest: float | None
    last: float | None
    loss: MomentsFacts
    grad_norm: MomentsFacts


class RecentFacts(_FactsModel):
    """The fields of `Recent`."""

    losses: tuple[float, ...]
    norms: tuple[PositiveFloat, ...]
    spike: PositiveInt | None


class StateFacts(_FactsModel):
    """The fields of `TrainState`."""

    iteration: NonNegativeInt
    consumed_samples: NonNegativeInt
    consumed_tokens: NonNegativeInt
    skipped: NonNegativeInt
    # Missing in checkpoints of earlier versions.
    stability: StabilityFacts | None = None
    bad_in_a_row: NonNegativeInt = 0
    recent: RecentFacts | None = None
    set_aside: tuple[tuple[NonNegativeInt, NonNegativeInt], ...] = ()
    not_updated: Progress = BEGINNING

    @model_validator(mode="after")
    def _made_updates(self) -> StateFacts:
        left, whole = self.not_updated, (self.iteration, self.consumed_samples, self.consumed_tokens)
        if not all(0 <= part <= total for part, total in zip(astuple(left), whole, strict=True)):
            raise ValueError("`not_updated` must be a part of the progress")
        return self

    def train_state(self) -> TrainState:
        """Make the state of these facts."""
        facts, stability = dict(self), None
        progress = Progress(
            *(facts.pop(name) for name in ("iteration", "consumed_samples", "consumed_tokens"))
        )
        recent = None if self.recent is None else Recent(**dict(self.recent))
        if self.stability is not None:
            saved = dict(self.stability)
            spreads = {name: RunningMoments(**dict(saved[name])) for name in ("loss", "grad_norm")}
            stability = Stability(**{**saved, **spreads})
        return TrainState(progress, **{**facts, "stability": stability, "recent": recent})


class ScalerFacts(_FactsModel):
    """The fields of `ScalerState`."""

    scale: PositiveFloat
    growth_tracker: NonNegativeInt
    hysteresis_left: int
    overflows_at_floor: NonNegativeInt


class DataFacts(_FactsModel):
    """One dataset of the training data: an entry of `megazero.data.sources.contents`."""

    prefix: str
    idx: str
    bin: str
    mask: str | None = None
    blocks: str | None = None
    named: PositiveInt | None = None  # None: of a version that blended a dataset with itself
    order: str | None = None  # None: Megatron's


class WriterFacts(_FactsModel):
    """The writer of a checkpoint: the number of ranks and their transports; defaults are for old versions."""

    world_size: NonNegativeInt = 0
    transports: dict[str, str] = Field(default_factory=dict)


class RunFacts(_FactsModel):
    """A checkpoint's facts about a run that can be resumed.

    Attributes:
        config: sections of the configuration, as the version that saved them wrote them.
        state: the progress of the training.
        scaler: state of the loss scaler; None if optimizer state was not saved.
        updates: number of updates made by the optimizer; None if its state was not saved.
        stream_seed: seed of the dropout streams.
        global_batch_size: in samples, at the end of a ramp.
        healthy: whether the run was `healthy` when it was saved; true for versions before this field.
        data: the datasets that it was trained on; None if unknown.
        written_by: the ranks that wrote it.
        lengths: the lengths of its schedules; None if they follow from the configuration.
        origin: the progress at which the training began with its present settings.
        blend: the segments of its blend; None if it cannot change.
        task: what the task noted (`TrainingTask.facts`), name -> value.
    """

    config: SavedConfig
    state: StateFacts
    scaler: ScalerFacts | None
    updates: NonNegativeInt | None
    stream_seed: int
    global_batch_size: PositiveInt
    healthy: bool = True
    data: list[DataFacts] | None = None  # checkpoints of earlier versions have none
    written_by: WriterFacts = WriterFacts()
    lengths: LrLengths | None = None
    origin: Progress = BEGINNING
    blend: History | None = None
    task: dict[str, str] = Field(default_factory=dict)


class ModelFacts(_FactsModel):
    """A checkpoint's facts about its model, as sections either in `config` or at the top level."""

    kind: str | None = None
    vocab_size: PositiveInt | None = None
    config: SavedConfig | None = None
    model: dict[str, object] | None = None
    tokenizer: dict[str, object] | None = None
    finetune: dict[str, object] | None = None


def read_facts(model: type[_Facts], content: Mapping[str, object], folder: Path) -> _Facts:
    """Validate the content of a checkpoint's `state.json`.

    Raises:
        DamagedCheckpointError: a fact is missing or has the wrong type.
    """
    facts: _Facts = parse(model, json.dumps(dict(content)).encode(), folder / STATE)
    return facts
