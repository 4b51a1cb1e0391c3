"""What `state.json` of a checkpoint says, checked: it may come from another version, or from anyone."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveFloat, PositiveInt, ValidationError

from megazero.checkpoint import CheckpointReader
from megazero.checkpoint.manifest import STATE, parse
from megazero.config.option import Section
from megazero.config.tree import Config, ModelConfig
from megazero.errors import CheckpointError

PRETRAINING = "pretraining"
"""The kind of the checkpoints that `snapshot` saves. Others hold weights alone, or a module of a user's."""

# Settings without a default, of which a model in use has no need.
_NOT_OF_THE_MODEL = MappingProxyType({"batch": {"micro_batch_size": 1}, "optimizer": {"lr": 1.0}})
SavedConfig = dict[str, dict[str, Any] | None]
_Section = TypeVar("_Section", bound=Section)
_Facts = TypeVar("_Facts", bound=BaseModel)


class _Strict(BaseModel):
    # What later versions add is theirs to read.
    model_config = ConfigDict(
        frozen=True, strict=True, extra="ignore", allow_inf_nan=False, protected_namespaces=()
    )


class StateFacts(_Strict):
    """As `TrainState`."""

    iteration: NonNegativeInt
    consumed_samples: NonNegativeInt
    consumed_tokens: NonNegativeInt
    skipped: NonNegativeInt


class ScalerFacts(_Strict):
    """As `ScalerState`."""

    scale: PositiveFloat
    growth_tracker: NonNegativeInt
    hysteresis_left: int
    overflows_at_floor: NonNegativeInt


class RunFacts(_Strict):
    """Of a run that continues.

    Attributes:
        config: sections of the configuration, as the version that saved them had them.
        state: where training stood.
        scaler, updates: of the optimizer; None where its state was not saved.
        stream_seed: of the dropout streams.
        global_batch_size: in samples, at the end of a ramp.
    """

    config: SavedConfig
    state: StateFacts
    scaler: ScalerFacts | None
    updates: NonNegativeInt | None
    stream_seed: int
    global_batch_size: PositiveInt


class _ModelFacts(_Strict):
    kind: str | None = None
    vocab_size: PositiveInt | None = None
    config: SavedConfig | None = None
    model: dict[str, Any] | None = None
    tokenizer: dict[str, Any] | None = None


def saved_run(reader: CheckpointReader) -> RunFacts | None:
    """What a checkpoint says of the run that saved it; None if it is of none, as converted weights are.

    Raises:
        DamagedCheckpointError: something is missing, or of a wrong type.
    """
    return _read(RunFacts, reader) if reader.facts.get("kind") == PRETRAINING else None


@dataclass(frozen=True)
class SavedModel:
    """What a checkpoint says of its model.

    Attributes:
        vocab_size: entries of the vocabulary, without padding.
        sections: of the configuration that it was saved with, `model` among them.
        place: where that was read.
    """

    vocab_size: int
    sections: SavedConfig
    place: Path

    def settings(self, fields: Iterable[str]) -> ModelConfig:
        """The model, of those of these fields that are there.

        Raises:
            CheckpointError: this version of the code has no such model.
        """
        saved = self.sections["model"]
        return self._validated(ModelConfig, {name: saved[name] for name in fields if name in saved})

    def config(self) -> Config:
        """The whole configuration, with defaults where nothing was saved, as of converted weights.

        Raises:
            CheckpointError: this version of the code has no such settings.
        """
        return self._validated(Config, {**_NOT_OF_THE_MODEL, **self.sections})

    def _validated(self, model: type[_Section], content: Mapping[str, Any]) -> _Section:
        try:
            return model.model_validate(content)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False)[0]
            where = ".".join(str(step) for step in first["loc"])
            raise CheckpointError(
                f"`{self.place}` must hold settings that this version knows, but {where} is "
                f"{first['input']!r:.40}: {first['msg']}; load it with its own version"
            ) from None


def saved_model(reader: CheckpointReader) -> SavedModel:
    """What a checkpoint says of its model.

    Raises:
        DamagedCheckpointError: something is of a wrong type.
        CheckpointError: it does not say which model it is of.
    """
    found = _read(_ModelFacts, reader)
    sections = found.config or {"model": found.model, "tokenizer": found.tokenizer}
    if sections.get("model") is None or found.vocab_size is None:
        raise CheckpointError(
            f"`{reader.folder}` must say which GPT model it is of, but does not (kind {found.kind!r}); "
            f"convert it anew"
        )
    place = reader.folder / STATE
    return SavedModel(found.vocab_size, {k: v for k, v in sections.items() if v is not None}, place)


def _read(model: type[_Facts], reader: CheckpointReader) -> _Facts:
    return parse(model, json.dumps(dict(reader.facts)).encode(), reader.folder / STATE)
