"""`Checkpoint`: a checkpoint's tensors, and its facts about its model and the run that saved it."""

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

# Values for settings without a default that inference does not use.
_NOT_OF_THE_MODEL = MappingProxyType({"batch": {"micro_batch_size": 1}, "optimizer": {"lr": 1.0}})
_Section = TypeVar("_Section", bound=Section)


@dataclass(frozen=True)
class SavedModel:
    """A checkpoint's description of its model.

    Attributes:
        vocab_size: number of vocabulary entries, without padding.
        sections: sections of the configuration that it was saved with, including `model`.
        place: the file of this description.
        shapes: the shapes of the checkpoint's tensors; None if unknown.
    """

    vocab_size: int
    sections: Mapping[str, Mapping[str, Any]]
    place: Path
    shapes: Mapping[Key, tuple[int, ...]] | None = None

    @cached_property
    def settings(self) -> ModelConfig:
        """The model's settings; those that were not saved have defaults.

        Raises:
            CheckpointError: this version does not know such a model, or the tensors' shapes contradict it.
        """
        saved = self.sections["model"]
        known = {name: saved[name] for name in ModelConfig.model_fields if name in saved}
        model = self._validated(ModelConfig, known)
        self._check(model)
        return model

    def config(self) -> Config:
        """The whole configuration; settings that were not saved, as with converted weights, have defaults.

        Raises:
            CheckpointError: this version does not know such settings, or the tensors' shapes contradict the
                model.
        """
        config = self._validated(Config, {**_NOT_OF_THE_MODEL, **self.sections})
        self._check(config.model)
        return config.model_copy(update={"tokenizer": self.tokenizer()})

    def tokenizer(self) -> TokenizerConfig:
        """The tokenizer of the training; its files are also looked for in the checkpoint's and run's folder.

        Raises:
            CheckpointError: this version does not know such settings.
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


def read_saved_model(
    content: Mapping[str, object], folder: Path, shapes: Mapping[Key, tuple[int, ...]] | None = None
) -> SavedModel:
    """Read the description of the model from the content of a checkpoint's `state.json`.

    Raises:
        DamagedCheckpointError: a fact has the wrong type.
        CheckpointError: it does not describe the model.
    """
    facts = read_facts(ModelFacts, content, folder)
    parts = {"model": facts.model, "tokenizer": facts.tokenizer, "finetune": facts.finetune}
    sections = facts.config or parts
    if sections.get("model") is None or facts.vocab_size is None:
        raise CheckpointError(
            f"`{folder}` must say which model it holds, but does not (kind {facts.kind!r}); convert it again"
        )
    present = {name: section for name, section in sections.items() if section is not None}
    tokenizer = present.get("tokenizer", {})
    if facts.kind == PRETRAINING and "BertWordPiece" in str(tokenizer.get("tokenizer_type")):
        present["tokenizer"] = {"wordpiece_first": "eos", **tokenizer}  # the default of versions without it
    return SavedModel(facts.vocab_size, present, folder / STATE, shapes)


def candidates_of(directory: str | Path, step: int | None, context: ParallelContext) -> Candidates:
    """List a run's checkpoints as the first rank sees them, since other ranks may see an older state of a
    shared file system.
    """
    here = Candidates(())

    def look() -> dict[str, list[str]]:
        nonlocal here
        here = candidates(directory, step)
        return {"folders": [str(folder) for folder in here.folders], "remarks": list(here.remarks)}

    first = together(context, look if context.rank == 0 else None, f"look into {directory}")
    return Candidates(tuple(map(Path, first["folders"])), tuple(first["remarks"]), here.states)


class Checkpoint(CheckpointReader):
    """A checkpoint, opened once: its tensors, and its facts about its model and its run."""

    @classmethod
    def opened(
        cls, folder: Path, verify: str, context: ParallelContext, states: Mapping[Path, bytes] | None = None
    ) -> Checkpoint:
        """Open a checkpoint on all ranks; every rank calls this.

        Args:
            verify: a value of `Verify`.
            states: contents of `state.json` that have been read, as in `Candidates`.

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
        """Open the checkpoint at a path, or a run's newest (or that of `step`); every rank calls this.

        Raises:
            CheckpointError: on every rank: there is none, it cannot be read, or does not describe its model.
        """
        look = (lambda: str(one_checkpoint(given, step))) if context.rank == 0 else None
        folder = Path(together(context, look, f"look into {given}"))
        checkpoint = cls.opened(folder, verify, context)
        together(context, lambda: checkpoint.model and None, f"open {folder}")
        return checkpoint

    @cached_property
    def model(self) -> SavedModel:
        """Its description of its model.

        Raises:
            DamagedCheckpointError: a fact has the wrong type.
            CheckpointError: it does not describe the model.
        """
        return read_saved_model(self.facts, self.folder, self.shapes)

    @cached_property
    def run(self) -> RunFacts | None:
        """Its facts about the run that saved it; None for weights that no run saved, such as converted ones.

        Raises:
            DamagedCheckpointError: a fact is missing or has the wrong type.
        """
        if self.facts.get("kind") != PRETRAINING:
            return None
        return read_facts(RunFacts, self.facts, self.folder)
