"""Reads ``config.json`` as an architecture and a `ModelConfig`, and writes it."""

from __future__ import annotations

import json
import stat
from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megazero.config.derive import FREE_MODEL_FIELDS, Difference, model_differences
from megazero.config.fields import names_with
from megazero.config.tree.model import ModelConfig
from megazero.config.tree.roles import Role
from megazero.errors import CheckpointError
from megazero.formats.hf.architecture import (
    GENERATING,
    NEVER,
    Architecture,
    FieldPair,
    Json,
    TensorLike,
)
from megazero.formats.hf.architectures import ARCHITECTURES, LACKING
from megazero.formats.hf.class_names import names_of, naming
from megazero.formats.hf.packed import Compression
from megazero.formats.hf.windows import without_idle_windows

CONFIG = "config.json"
_LARGEST_JSON = 100 << 20
# Fields that ``config.json`` does not fix, so that a run may set them: the number of positions (where they
# have no table), the precision of the residual stream, and the decay of norms.
_FREE = FREE_MODEL_FIELDS | {
    *("max_position_embeddings", "fp32_residual_connection", "apply_wd_to_qk_layernorm")
}


@dataclass(frozen=True)
class TokenIds:
    """The ids of the tokens that begin, end and pad sequences; transformers allows several that end one."""

    bos: int | None = None
    eos: int | tuple[int, ...] | None = None
    pad: int | None = None

    def as_json(self) -> dict[str, Any]:
        """The fields of ``config.json`` and ``generation_config.json``."""
        eos = list(self.eos) if isinstance(self.eos, tuple) else self.eos
        fields = {"bos_token_id": self.bos, "eos_token_id": eos}
        return fields if self.pad is None else {**fields, "pad_token_id": self.pad}

    @classmethod
    def of_json(cls, config: Json) -> TokenIds:
        """Read these fields; a value that is not a token id counts as None."""

        def one(value: object) -> int | None:
            return value if type(value) is int and value >= 0 else None

        eos = config.get("eos_token_id")
        several = tuple(value for value in eos if one(value) is not None) if isinstance(eos, list) else ()
        return cls(one(config.get("bos_token_id")), several or one(eos), one(config.get("pad_token_id")))


NO_TOKENS = TokenIds()


@dataclass(frozen=True)
class Description:
    """A model as ``config.json`` describes it.

    Attributes:
        architecture: the architecture.
        model: the model; its dropouts and sequence length are those of the original training.
        vocab_size: rows of the embedding.
        tokens: the special tokens.
        dtype: the name of the weights' dtype, such as ``bfloat16``, or None.
        labels: the names of a classifier's classes, or of the choices; empty if they have none.
        compression: the scheme of weights of few bits; None for floats.
    """

    architecture: Architecture
    model: ModelConfig
    vocab_size: int
    tokens: TokenIds
    dtype: str | None
    labels: tuple[str, ...] = ()
    compression: Compression | None = None

    @classmethod
    def read(cls, folder: Path) -> Description:
        """Read ``config.json`` in a local folder.

        Raises:
            CheckpointError: the file cannot be read, or describes a model that megazero lacks; names file and
                field.
        """
        path = folder / CONFIG
        config = read_json(path)
        try:
            return cls._of(config)
        except ValueError as error:
            raise CheckpointError(f"`{path}`: {error}") from None

    def given(self, tensors: Mapping[str, TensorLike]) -> Description:
        """The description after `Architecture.seen` has looked at the folder's tensors.

        Args:
            tensors: by name, with the prefix and the present names.
        """
        model = self.architecture.seen(self.model, tensors)
        classes = [
            candidate for candidate in ARCHITECTURES if candidate.model_type == self.architecture.model_type
        ]
        fitting = next(candidate for candidate in classes if not objections(candidate, model))
        return replace(self, architecture=fitting, model=model)

    @classmethod
    def _of(cls, config: Json) -> Description:
        architecture = find_architecture(config)
        model = model_of(architecture, config)
        vocab_size = config.get("vocab_size")
        if type(vocab_size) is not int or vocab_size < 1:
            raise ValueError(f"`vocab_size` must be a positive number, but is {vocab_size!r:.40}")
        dtype = config.get("dtype", config.get("torch_dtype"))
        return cls(
            architecture,
            model,
            vocab_size,
            TokenIds.of_json(config),
            dtype if isinstance(dtype, str) else None,
            names_of(config) if architecture.classifies else (),
            Compression.of(config),
        )


def read_json(path: Path) -> dict[str, object]:
    """Read a JSON object from a file.

    Raises:
        CheckpointError: the file is missing, cannot be read or holds something else.
    """
    try:
        status = path.stat()
        # Reading a named pipe would wait for its writer.
        if not stat.S_ISREG(status.st_mode) or status.st_size > _LARGEST_JSON:
            raise CheckpointError(
                f"`{path}` must be a JSON file, but is not a plain file or has {status.st_size} bytes"
            )
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(
            f"`{path}` must be readable, but is not ({error.strerror}); give a folder that `save_pretrained` "
            "wrote"
        ) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"`{path}` must hold JSON, but does not: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"`{path}` must hold an object, but holds a {type(content).__name__}")
    return content


def find_architecture(config: Json) -> Architecture:
    """The architecture named by ``architectures``, or by ``model_type`` if that is missing.

    Raises:
        ValueError: megazero has no such architecture.
    """
    known = ", ".join(architecture.name for architecture in ARCHITECTURES)
    named = config.get("architectures")
    if named:
        matches = [f for f in ARCHITECTURES if named == [f.name]]
        if not matches:
            why = LACKING.get(str(named[0]), "") if isinstance(named, list) else ""
            raise ValueError(
                f"`architectures` must be one of {known}, but is {named!r:.100}{why and f', whose {why}'}"
            )
    else:
        matches = [f for f in ARCHITECTURES if config.get("model_type") == f.model_type]
        if not matches:
            raise ValueError(
                f"`architectures` must be one of {known}, but is missing, and `model_type` is "
                f"{config.get('model_type')!r:.100}"
            )
    return matches[0]


def model_of(architecture: Architecture, config: Json) -> ModelConfig:
    """The model that ``config.json`` describes; its sequence length is the number of its positions.

    Raises:
        ValueError: megazero lacks such a model.
    """
    config = architecture.plain(config)
    known = {*dict(architecture.fixed), *(setting.theirs for setting in architecture.settings)}
    for field in NEVER:
        if field not in known and config.get(field):
            raise ValueError(f"`{field}` must be absent, but is {config[field]!r:.100}; it is not supported")
    for field, value in architecture.fixed:
        if config.get(field, value) != value:
            raise ValueError(f"`{field}` must be {value}, but is {config[field]!r:.40}; it is not supported")
    fields: dict[str, Any] = {**dict(architecture.ours_fixed), **dict(architecture.implied)}
    origin: dict[str, str] = {}
    for setting in architecture.settings:
        value = _read(setting, config)
        if setting.ours in origin and fields[setting.ours] != value:
            raise ValueError(
                f"`{origin[setting.ours]}` and `{setting.theirs}` must agree, but are {fields[setting.ours]} "
                f"and {value}; here both are `{setting.ours}`"
            )
        fields[setting.ours], origin[setting.ours] = value, setting.theirs
    try:
        model = ModelConfig(**fields, seq_length=fields["max_position_embeddings"])
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        raise ValueError(f"`{origin.get(name, name)}` is {first['input']!r:.40}: {first['msg']}") from None
    model = without_idle_windows(model)
    for limit in architecture.limits:
        if not limit.holds(model):
            raise ValueError(limit.words)
    return model


def _read(setting: FieldPair, config: Json) -> object:
    """The value of a field, in the form of `ModelConfig`."""
    value = config.get(setting.theirs, setting.default)
    if value is None and setting.default is None:
        return None
    kind = setting.kind or type(setting.default)
    accepted = (int, float) if kind is float else (kind,)
    if type(value) not in accepted:
        raise ValueError(f"`{setting.theirs}` must be a {kind.__name__}, but is {value!r:.40}")
    if not setting.words:
        try:
            return setting.taken(value)
        except ArithmeticError as error:  # `taken` divides by 0, or overflows
            raise ValueError(
                f"`{setting.theirs}` must be a number to calculate with, but is {value!r:.40}: {error}"
            ) from error
    for theirs, ours in setting.words:
        if theirs == value:
            return ours
    known = ", ".join(str(theirs) for theirs, _ in setting.words)
    raise ValueError(f"`{setting.theirs}` must be one of {known}, but is {value!r:.40}; it is not supported")


def architecture_of(model: ModelConfig, name: str | None = None) -> Architecture:
    """The first architecture that can express this model, or the one called `name`.

    Raises:
        CheckpointError: there is none. The message gives the reasons against each architecture of the model's
            family, except those with all the reasons of another one and more.
    """
    classifies = model.num_classes is not None
    family = [
        architecture
        for architecture in ARCHITECTURES
        if (fixed := dict(architecture.ours_fixed))["family"] == model.family
        and architecture.classifies == classifies
        and fixed.get("num_classes", model.num_classes) == model.num_classes
    ]
    if not family:
        raise CheckpointError(
            f"`num_classes` must be unset or 1 for a model of the family {model.family}, but is "
            f"{model.num_classes}: the classifiers that transformers makes of such models, as "
            "GPT2ForSequenceClassification, have no bias; `finetune.py --epochs 0` evaluates it here"
        )
    if name is not None and name not in [architecture.name for architecture in family]:
        known = ", ".join(architecture.name for architecture in family)
        raise CheckpointError(f"the architecture must be one of {known}, but is {name!r}")
    if name is None:  # whether the model is a hybrid decides first, so that messages are not about that
        family = [
            architecture
            for architecture in family
            if dict(architecture.ours_fixed).get("is_hybrid_model", False) == model.is_hybrid_model
        ]
    else:
        family = [architecture for architecture in family if architecture.name == name]
    against = {architecture.name: objections(architecture, model) for architecture in family}
    for architecture in family:
        if not against[architecture.name]:
            return architecture
    lines = [
        f"{name}: {'; '.join(reasons)}"
        for name, reasons in against.items()
        if not any(set(fewer) < set(reasons) for fewer in against.values())
    ]
    raise CheckpointError(
        "the model must be one that transformers supports, but is not: " + "\n  ".join(lines)
    )


def objections(architecture: Architecture, model: ModelConfig) -> list[str]:
    """The reasons why an architecture cannot express this model; empty if it can."""
    allowed = [(field, [value]) for field, value in architecture.ours_fixed]
    allowed += [
        (setting.ours, [ours for _, ours in setting.words])
        for setting in architecture.settings
        if setting.words
    ]
    allowed += [
        (field, [ModelConfig.model_fields[field].default])
        for field in names_with(Role.VARIANT)
        if field not in architecture.named
    ]
    reasons = [
        f"`{field}` must be {' or '.join(dict.fromkeys(map(str, values)))}, "
        f"but is {getattr(model, field)!s:.100}"
        for field, values in allowed
        if getattr(model, field) not in values
    ]
    if architecture.classifies != (model.num_classes is not None):
        reasons.append(f"`num_classes` must be {'set' if architecture.classifies else 'unset'}")
    return reasons + [limit.words for limit in architecture.limits if not limit.holds(model)]


def config_of(
    architecture: Architecture,
    model: ModelConfig,
    vocab_size: int,
    tokens: TokenIds,
    dtype: str,
    labels: tuple[str, ...] = (),
) -> dict[str, object]:
    """``config.json`` of a model that the architecture can express; `labels` name a classifier's classes."""
    fields = {setting.theirs: setting.written(model) for setting in architecture.settings}
    return {
        "architectures": [architecture.name],
        "model_type": architecture.model_type,
        **architecture.complete({**fields, **dict(architecture.fixed)}),
        **(naming(labels) if labels else {}),
        # If it is left out, some decoders assume an id that a small vocabulary may not have.
        **({"pad_token_id": None} if architecture.auto == GENERATING else {}),
        **tokens.as_json(),
        "torch_dtype": dtype,
        "use_cache": True,
        "vocab_size": vocab_size,
    }


def differences(theirs: ModelConfig, ours: ModelConfig, free: Set[str] = frozenset()) -> list[str]:
    """The fields in `unlike`, as clauses "`field` is theirs, not ours"."""
    return [f"`{field}` is {a}, not {b}" for field, a, b in unlike(theirs, ours, free)]


def unlike(theirs: ModelConfig, ours: ModelConfig, free: Set[str] = frozenset()) -> list[Difference]:
    """The fields with which two models compute something else from the same weights.

    Args:
        theirs, ours: the two models.
        free: fields that may differ.

    Returns:
        (field, value in `theirs`, value in `ours`).
    """
    left_out = _FREE | free
    if not (_has_dense_mlps(theirs) or _has_dense_mlps(ours)):
        left_out |= {"ffn_hidden_size"}
    if not (theirs.layers_of("*-E") or ours.layers_of("*-E")):
        left_out |= {*names_with(Role.NOT_OF_MAMBA)}
    fields = [field for field in ModelConfig.model_fields if field not in left_out]
    if theirs.position_embedding_type == "learned_absolute":
        fields.append("max_position_embeddings")
    return model_differences(theirs, ours, fields)


def _has_dense_mlps(model: ModelConfig) -> bool:
    return model.layers_of("-E") > (model.expert_places if model.num_experts else 0)
