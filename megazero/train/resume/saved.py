"""The content of a checkpoint besides its tensors: opens it on all ranks, and validates `state.json`.

The file may come from another version or from anyone at all.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

from megazero.checkpoint.described import check_saved_model
from megazero.checkpoint.directory import Share
from megazero.checkpoint.folder import Candidates, candidates
from megazero.checkpoint.locate import one_checkpoint
from megazero.checkpoint.manifest import STATE, parse
from megazero.checkpoint.part import Key
from megazero.checkpoint.reader import CheckpointReader, Verify
from megazero.checkpoint.saver import together
from megazero.config.steps import BEGINNING, Progress
from megazero.config.training_plan import LrLengths
from megazero.config.tree.config import Config
from megazero.config.tree.model import ModelConfig
from megazero.config.tree.option import Section
from megazero.config.tree.tokenizer import TokenizerConfig
from megazero.errors import CheckpointError
from megazero.mpu.context import ParallelContext
from megazero.train.step.spikes import Recent
from megazero.train.step.stability import Spread, Stability
from megazero.train.step.state import TrainState

PRETRAINING = "pretraining"
"""The kind of checkpoint that `snapshot` saves. Others hold only weights, or a user's own module."""

# Settings without a default that a model in use does not need.
_NOT_OF_THE_MODEL = MappingProxyType({"batch": {"micro_batch_size": 1}, "optimizer": {"lr": 1.0}})
SavedConfig = dict[str, dict[str, Any] | None]
_Section = TypeVar("_Section", bound=Section)
_Facts = TypeVar("_Facts", bound=BaseModel)


class _FactsModel(BaseModel):
    # Ignore what later versions add.
    model_config = ConfigDict(
        frozen=True, strict=True, extra="ignore", allow_inf_nan=False, protected_namespaces=()
    )


class SpreadFacts(_FactsModel):
    """The fields of `Spread`."""

    mean: float
    variance: NonNegativeFloat


class StabilityFacts(_FactsModel):
    """The fields of `Stability`."""

    updates: NonNegativeInt
    lowest: float | None
    last: float | None
    loss: SpreadFacts
    grad_norm: SpreadFacts


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
    # Checkpoints of earlier versions have none of these.
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
        """The state itself."""
        facts, stability = dict(self), None
        progress = Progress(
            *(facts.pop(name) for name in ("iteration", "consumed_samples", "consumed_tokens"))
        )
        recent = None if self.recent is None else Recent(**dict(self.recent))
        if self.stability is not None:
            saved = dict(self.stability)
            spreads = {name: Spread(**dict(saved[name])) for name in ("loss", "grad_norm")}
            stability = Stability(**{**saved, **spreads})
        return TrainState(progress, **{**facts, "stability": stability, "recent": recent})


class ScalerFacts(_FactsModel):
    """The fields of `ScalerState`."""

    scale: PositiveFloat
    growth_tracker: NonNegativeInt
    hysteresis_left: int
    overflows_at_floor: NonNegativeInt


class DataFacts(_FactsModel):
    """One dataset that was trained on: an entry of `megazero.data.sources.contents`."""

    prefix: str
    idx: str
    bin: str
    blocks: str | None = None
    named: PositiveInt | None = None  # earlier versions mixed a dataset that was named twice with itself


class WriterFacts(_FactsModel):
    """The writer of a checkpoint: the number of ranks and their transports; earlier versions say less."""

    world_size: NonNegativeInt = 0
    transports: dict[str, str] = Field(default_factory=dict)


class RunFacts(_FactsModel):
    """A checkpoint's facts about a run that can be resumed.

    Attributes:
        config: sections of the configuration, in the form used by the version that saved them.
        state: the progress of the training.
        scaler: state of the loss scaler; None if optimizer state was not saved.
        updates: number of updates made by the optimizer; None if its state was not saved.
        stream_seed: seed of the dropout streams.
        global_batch_size: in samples, at the end of a ramp.
        healthy: whether nothing was wrong with the run when it was saved; versions that did not ask are
            believed.
        data: the datasets that it was trained on; None if it does not say.
        written_by: the ranks that wrote it.
        lengths: those of its schedules; None if it does not say: they follow from the configuration.
        origin: where its settings began.
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


class _ModelFacts(_FactsModel):
    kind: str | None = None
    vocab_size: PositiveInt | None = None
    config: SavedConfig | None = None
    model: dict[str, Any] | None = None
    tokenizer: dict[str, Any] | None = None
    finetune: dict[str, Any] | None = None


@dataclass(frozen=True)
class SavedModel:
    """A checkpoint's description of its model.

    Attributes:
        vocab_size: number of vocabulary entries, without padding.
        sections: sections of the configuration that it was saved with, including `model`.
        place: the file that this was read from.
        shapes: the shapes of the checkpoint's tensors; None if unknown.
    """

    vocab_size: int
    sections: Mapping[str, Mapping[str, Any]]
    place: Path
    shapes: Mapping[Key, tuple[int, ...]] | None = None

    @cached_property
    def settings(self) -> ModelConfig:
        """The model's settings, as far as they were saved.

        Raises:
            CheckpointError: this version of the code does not have such a model, or the tensors have no room
                for it.
        """
        saved = self.sections["model"]
        known = {name: saved[name] for name in ModelConfig.model_fields if name in saved}
        model = self._validated(ModelConfig, known)
        self._check(model)
        return model

    def config(self) -> Config:
        """The whole configuration, with defaults where nothing was saved, as with converted weights.

        Raises:
            CheckpointError: this version of the code does not have such settings, or the tensors have no room
                for the model.
        """
        config = self._validated(Config, {**_NOT_OF_THE_MODEL, **self.sections})
        self._check(config.model)
        return config.model_copy(update={"tokenizer": self.tokenizer()})

    def tokenizer(self) -> TokenizerConfig:
        """The tokenizer of the training; its files may be in the checkpoint's or run's folder, too.

        Raises:
            CheckpointError: this version of the code does not have such settings.
        """
        tokenizer = self._validated(TokenizerConfig, self.sections.get("tokenizer") or {})
        return tokenizer.located(self.place.parent, self.place.parent.parent)

    def _check(self, model: ModelConfig) -> None:
        if self.shapes is not None:
            check_saved_model(model, self.vocab_size, self.shapes, self.place)

    def _validated(self, model: type[_Section], content: Mapping[str, object]) -> _Section:
        try:
            return model.model_validate(content)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False)[0]
            where = ".".join(str(step) for step in first["loc"])
            raise CheckpointError(
                f"`{self.place}` must hold settings that this version knows, but {where} is "
                f"{first['input']!r:.40}: {first['msg']}; load it with its own version"
            ) from None


def model_said(
    content: Mapping[str, Any], folder: Path, shapes: Mapping[Key, tuple[int, ...]] | None = None
) -> SavedModel:
    """The description of its model in the content of a checkpoint's `state.json`.

    Raises:
        DamagedCheckpointError: something has the wrong type.
        CheckpointError: it does not say which model the checkpoint holds.
    """
    facts = _read(_ModelFacts, content, folder)
    parts = {"model": facts.model, "tokenizer": facts.tokenizer, "finetune": facts.finetune}
    sections = facts.config or parts
    if sections.get("model") is None or facts.vocab_size is None:
        raise CheckpointError(
            f"`{folder}` must say which model it holds, but does not (kind {facts.kind!r}); convert it again"
        )
    given = {name: section for name, section in sections.items() if section is not None}
    tokenizer = given.get("tokenizer", {})
    if facts.kind == PRETRAINING and "BertWordPiece" in str(tokenizer.get("tokenizer_type")):
        given["tokenizer"] = {"wordpiece_first": "eos", **tokenizer}  # as in versions that do not say it
    return SavedModel(facts.vocab_size, given, folder / STATE, shapes)


def _read(model: type[_Facts], content: Mapping[str, Any], folder: Path) -> _Facts:
    facts: _Facts = parse(model, json.dumps(dict(content)).encode(), folder / STATE)
    return facts


def candidates_of(directory: str | Path, step: int | None, context: ParallelContext) -> Candidates:
    """The first rank's candidates; on a shared file system, other ranks may still see an older state."""
    here = Candidates(())

    def look() -> dict[str, list[str]]:
        nonlocal here
        here = candidates(directory, step)
        return {"folders": [str(folder) for folder in here.folders], "remarks": list(here.remarks)}

    first = together(context, look if context.rank == 0 else None, f"look into {directory}")
    return Candidates(tuple(map(Path, first["folders"])), tuple(first["remarks"]), here.states)


class Checkpoint(CheckpointReader):
    """A checkpoint that is opened once: its tensors, and what it says of its model and of its run."""

    @classmethod
    def opened(
        cls, folder: Path, verify: str, context: ParallelContext, states: Mapping[Path, bytes] | None = None
    ) -> Checkpoint:
        """Open a checkpoint on all ranks; every rank calls this.

        `verify` and `states` are as in `Verify` and `Candidates`.

        Raises:
            CheckpointError: on every rank: it cannot be read.
        """
        here: list[Checkpoint] = []

        def work() -> None:
            how, state = Verify(verify), (states or {}).get(folder)
            here.append(cls(folder, verify=how, share=Share.of(context), state=state))

        together(context, work, f"open {folder}")
        return here[0]

    @classmethod
    def at(cls, given: str, verify: str, context: ParallelContext, step: int | None = None) -> Checkpoint:
        """Open the checkpoint that a path means, as the first rank sees it; every rank calls this.

        `step` asks for the checkpoint of one step of a run.

        Raises:
            CheckpointError: on every rank: there is none, it cannot be read, or does not describe its model.
        """
        look = (lambda: str(one_checkpoint(Path(given), step))) if context.rank == 0 else None
        folder = Path(together(context, look, f"look into {given}"))
        checkpoint = cls.opened(folder, verify, context)
        together(context, lambda: checkpoint.model and None, f"open {folder}")
        return checkpoint

    @cached_property
    def model(self) -> SavedModel:
        """Its description of its model.

        Raises:
            DamagedCheckpointError: something has the wrong type.
            CheckpointError: it does not say which model it holds.
        """
        return model_said(self.facts, self.folder, self.shapes)

    @cached_property
    def run(self) -> RunFacts | None:
        """Its facts about the run that saved it; None if no run did, as with converted weights.

        Raises:
            DamagedCheckpointError: something is missing or has the wrong type.
        """
        return _read(RunFacts, self.facts, self.folder) if self.facts.get("kind") == PRETRAINING else None
