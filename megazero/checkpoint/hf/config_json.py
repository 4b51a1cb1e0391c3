"""``config.json``: which family it is of and which model of ours it describes, and the way back."""

from __future__ import annotations

import json
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megazero.checkpoint.hf.family import NEVER, Family, Json, Setting
from megazero.checkpoint.hf.gpt2 import GPT2
from megazero.checkpoint.hf.llama import LLAMA
from megazero.config.derive import model_differences
from megazero.config.tree import ModelConfig
from megazero.errors import CheckpointError

FAMILIES: tuple[Family, ...] = (GPT2, LLAMA)
CONFIG = "config.json"
_LARGEST_JSON = 100 << 20
# Ours that change how a model is trained or laid out, but not what given weights compute.
_FREE = frozenset(
    {
        "seq_length",
        "max_position_embeddings",
        "hidden_dropout",
        "attention_dropout",
        "init_method_std",
        "vocab_size",
        "make_vocab_size_divisible_by",
        "fp32_residual_connection",
    }
)


@dataclass(frozen=True)
class TokenIds:
    """Which tokens begin, end and fill sequences; transformers allows several that end one."""

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
        """From these fields; what is no token id counts as none."""

        def one(value: Any) -> int | None:
            return value if type(value) is int and value >= 0 else None

        eos = config.get("eos_token_id")
        several = tuple(each for each in eos if one(each) is not None) if isinstance(eos, list) else ()
        return cls(one(config.get("bos_token_id")), several or one(eos), one(config.get("pad_token_id")))


NO_TOKENS = TokenIds()


@dataclass(frozen=True)
class Description:
    """What ``config.json`` says.

    Attributes:
        family: its architecture.
        model: the model in our terms; its dropouts and sequence length are only what theirs was made with.
        vocab_size: rows of the embedding.
        tokens: special ones.
        dtype: as it names it, such as ``bfloat16``; None where it is silent.
    """

    family: Family
    model: ModelConfig
    vocab_size: int
    tokens: TokenIds
    dtype: str | None

    @classmethod
    def read(cls, folder: Path) -> Description:
        """From a local folder.

        Raises:
            CheckpointError: it cannot be read, or describes what ours has not; the file and field are named.
        """
        path = folder / CONFIG
        config = read_json(path)
        try:
            return cls._of(config)
        except ValueError as error:
            raise CheckpointError(f"`{path}`: {error}") from None

    @classmethod
    def _of(cls, config: Json) -> Description:
        family = find_family(config)
        model = model_of(family, config)
        vocab_size = config.get("vocab_size")
        if type(vocab_size) is not int or vocab_size < 1:
            raise ValueError(f"`vocab_size` must be a positive number, but is {vocab_size!r:.40}")
        dtype = config.get("dtype", config.get("torch_dtype"))
        return cls(
            family, model, vocab_size, TokenIds.of_json(config), dtype if isinstance(dtype, str) else None
        )


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        CheckpointError: it is missing, unreadable or holds something else.
    """
    try:
        status = path.stat()
        # Reading a pipe would wait for its writer.
        if not stat.S_ISREG(status.st_mode) or status.st_size > _LARGEST_JSON:
            raise CheckpointError(f"`{path}` must be a JSON file, but is none or has {status.st_size} bytes")
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(
            f"`{path}` must be readable, but is not ({error.strerror}); give a folder that `save_pretrained` "
            f"wrote"
        ) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"`{path}` must hold JSON, but does not: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"`{path}` must hold an object, but holds a {type(content).__name__}")
    return content


def find_family(config: Json) -> Family:
    """By `architectures`, or by `model_type` where there are none.

    Raises:
        ValueError: none fits.
    """
    known = ", ".join(family.architecture for family in FAMILIES)
    named = config.get("architectures")
    if named:
        found = [f for f in FAMILIES if named == [f.architecture]]
        if not found:
            raise ValueError(f"`architectures` must be one of {known}, but is {named!r:.100}")
    else:
        found = [f for f in FAMILIES if config.get("model_type") == f.model_type]
        if not found:
            raise ValueError(
                f"`architectures` must be one of {known}, but is missing, and `model_type` is "
                f"{config.get('model_type')!r:.100}"
            )
    return found[0]


def model_of(family: Family, config: Json) -> ModelConfig:
    """The model of ours that ``config.json`` describes; its sequence length is all its positions.

    Raises:
        ValueError: ours has no such model.
    """
    config = family.plain(config)
    for field in NEVER:
        if field not in dict(family.fixed) and config.get(field):
            raise ValueError(f"`{field}` must be absent, but is {config[field]!r:.100}; it is not supported")
    for field, value in family.fixed:
        if config.get(field, value) != value:
            raise ValueError(f"`{field}` must be {value}, but is {config[field]!r:.40}; it is not supported")
    fields: dict[str, Any] = {**dict(family.ours_fixed), **dict(family.training)}
    origin: dict[str, str] = {}
    for setting in family.settings:
        value = _read(setting, config)
        if setting.ours in origin and fields[setting.ours] != value:
            raise ValueError(
                f"`{origin[setting.ours]}` and `{setting.theirs}` must agree, but are {fields[setting.ours]} "
                f"and {value}; `{setting.ours}` is both here"
            )
        fields[setting.ours], origin[setting.ours] = value, setting.theirs
    try:
        model = ModelConfig(**fields, seq_length=fields["max_position_embeddings"])
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        raise ValueError(f"`{origin.get(name, name)}` is {first['input']!r:.40}: {first['msg']}") from None
    for limit in family.limits:
        if not limit.holds(model):
            raise ValueError(limit.words)
    return model


def _read(setting: Setting, config: Json) -> Any:
    """The value that a setting has in ours."""
    value = config.get(setting.theirs, setting.default)
    if value is None and setting.default is None:
        return None
    kind = setting.kind or type(setting.default)
    accepted = (int, float) if kind is float else (kind,)
    if type(value) not in accepted:
        raise ValueError(f"`{setting.theirs}` must be a {kind.__name__}, but is {value!r:.40}")
    if not setting.words:
        return value
    for theirs, ours in setting.words:
        if theirs == value:
            return ours
    known = ", ".join(str(theirs) for theirs, _ in setting.words)
    raise ValueError(f"`{setting.theirs}` must be one of {known}, but is {value!r:.40}; it is not supported")


def family_of(model: ModelConfig) -> Family:
    """The first family that has this model.

    Raises:
        CheckpointError: none has; what stands against each is named.
    """
    against = {family.architecture: objections(family, model) for family in FAMILIES}
    for family in FAMILIES:
        if not against[family.architecture]:
            return family
    lines = [f"{name}: {'; '.join(reasons)}" for name, reasons in against.items()]
    raise CheckpointError(
        "the model must be one that transformers has, but is not: " + "\n  ".join(["", *lines]).lstrip("\n")
    )


def objections(family: Family, model: ModelConfig) -> list[str]:
    """Why a family does not have this model; none if it has."""
    allowed = [(field, [value]) for field, value in family.ours_fixed]
    allowed += [(each.ours, [ours for _, ours in each.words]) for each in family.settings if each.words]
    found = [
        f"`{field}` must be {' or '.join(dict.fromkeys(map(str, values)))}, but is {getattr(model, field)}"
        for field, values in allowed
        if getattr(model, field) not in values
    ]
    return found + [limit.words for limit in family.limits if not limit.holds(model)]


def config_of(
    family: Family, model: ModelConfig, vocab_size: int, tokens: TokenIds, dtype: str
) -> dict[str, Any]:
    """``config.json`` of a model that the family has."""
    fields: dict[str, Any] = {}
    for setting in family.settings:
        value = getattr(model, setting.resolved or setting.ours)
        words = {ours: theirs for theirs, ours in reversed(setting.words)}
        fields[setting.theirs] = words[value] if words else value
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        **family.complete({**fields, **dict(family.fixed)}),
        **tokens.as_json(),
        "torch_dtype": dtype,
        "use_cache": True,
        "vocab_size": vocab_size,
    }


def differences(theirs: ModelConfig, ours: ModelConfig) -> list[str]:
    """Fields in which given weights would compute something else, as ``field: theirs, not ours``."""
    fields = [field for field in ModelConfig.model_fields if field not in _FREE]
    if theirs.position_embedding_type == "learned_absolute":
        fields.append("max_position_embeddings")
    return [f"`{field}` is {a}, not {b}" for field, a, b in model_differences(theirs, ours, fields)]
