"""A checkpoint as a run needs it: its tensors, and what it says of its model and of the run that saved it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from pydantic import ValidationError

from megazero.checkpoint.described import check_saved_model
from megazero.checkpoint.directory import ReaderRank
from megazero.checkpoint.folder import Candidates, candidates
from megazero.checkpoint.locate import one_checkpoint
from megazero.checkpoint.manifest import STATE
from megazero.checkpoint.part import Key
from megazero.checkpoint.reader import CheckpointReader, Verify
from megazero.checkpoint.saver import together
from megazero.config.tree.config import Config
from megazero.config.tree.model import ModelConfig
from megazero.config.tree.option import Section
from megazero.config.tree.tokenizer import TokenizerConfig
from megazero.errors import CheckpointError
from megazero.mpu.context import ParallelContext
from megazero.train.resume.facts import PRETRAINING, ModelFacts, RunFacts, read_facts

# Settings without a default that a model in use does not need.
_NOT_OF_THE_MODEL = MappingProxyType({"batch": {"micro_batch_size": 1}, "optimizer": {"lr": 1.0}})
_Section = TypeVar("_Section", bound=Section)


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
    facts = read_facts(ModelFacts, content, folder)
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
            here.append(cls(folder, verify=how, rank=ReaderRank.of(context), state=state))

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
        return (
            read_facts(RunFacts, self.facts, self.folder) if self.facts.get("kind") == PRETRAINING else None
        )
