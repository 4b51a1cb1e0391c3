"""A family: one architecture of transformers, its tensors and ``config.json`` as tables for both ways."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megazero.checkpoint.rule import Rule
from megazero.config.tree import ModelConfig

Json = Mapping[str, Any]


@dataclass(frozen=True)
class Setting:
    """A field of ``config.json`` and the field of ours that says the same.

    Attributes:
        theirs: its name there.
        ours: its name in `ModelConfig`.
        default: what transformers takes where ``config.json`` is silent; its type is the field's.
        kind: the field's type, where the default is None.
        words: (their value, ours), where the values differ; the first with our value is what is written.
        resolved: the property of `ModelConfig` that is written, where ours may be left to a default.
    """

    theirs: str
    ours: str
    default: Any
    kind: type | None = None
    words: tuple[tuple[Any, Any], ...] = ()
    resolved: str | None = None


@dataclass(frozen=True)
class Limit:
    """What must hold of a model's shape for both sides to have it.

    Attributes:
        holds: of the shape.
        words: what must be, as in "`x` must be ...".
    """

    holds: Callable[[ModelConfig], bool]
    words: str


COMMON_LIMITS = (
    Limit(
        lambda m: m.num_attention_heads % m.kv_heads == 0,
        "the number of key/value heads must divide that of the query heads",
    ),
    Limit(
        lambda m: m.hidden_size % m.num_attention_heads == 0,
        "the hidden size must be a multiple of the number of heads",
    ),
)

# Fields that change what a model computes, in ways that no family has; null, false and empty do not.
NEVER = (
    "quantization_config",
    "pruned_heads",
    "sliding_window",
    "use_sliding_window",
    "add_cross_attention",
    "is_encoder_decoder",
    "auto_map",
)


@dataclass(frozen=True)
class Family:
    """What megazero has to know of one architecture. Another one is one more file that makes such a value.

    Attributes:
        architecture: the class in transformers, as in ``architectures``.
        model_type: as in ``config.json``.
        prefix: of all tensors but the head's; files of the bare model leave it out.
        rules: the tensors.
        tied: (name that may be left out, name of the tensor it equals) where the head is tied.
        ignored: regular expressions of buffers that are no weights.
        settings: fields of ``config.json``.
        fixed: (field of theirs, the only value that ours has), which is also what silence means.
        ours_fixed: (field of ours, the only value that theirs has).
        training: (field of ours, value) that theirs always trains with; it changes no weight's meaning.
        limits: on the shape.
        plain: ``config.json`` with nested or renamed fields brought to those of `settings`; raises
            ValueError, in words, where it says what ours has not.
        complete: the opposite, for writing.
    """

    architecture: str
    model_type: str
    prefix: str
    rules: tuple[Rule, ...]
    tied: tuple[str, str]
    ignored: tuple[str, ...]
    settings: tuple[Setting, ...]
    fixed: tuple[tuple[str, Any], ...] = ()
    ours_fixed: tuple[tuple[str, Any], ...] = ()
    training: tuple[tuple[str, Any], ...] = ()
    limits: tuple[Limit, ...] = COMMON_LIMITS
    plain: Callable[[Json], dict[str, Any]] = dict
    complete: Callable[[Json], dict[str, Any]] = dict
