"""An architecture of transformers: its tensors and ``config.json`` as tables for both directions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from megazero.checkpoint.naming import TensorRule
from megazero.config.tree import ModelConfig

Json = Mapping[str, Any]


@dataclass(frozen=True)
class FieldPair:
    """A field of ``config.json`` and our field that says the same.

    Attributes:
        theirs: its name there.
        ours: its name in `ModelConfig`.
        default: what transformers assumes if ``config.json`` lacks the field; its type is the field's.
        kind: the field's type, if the default is None.
        words: (their value, ours), if the values differ; the first pair with our value is what is written.
        resolved: the property of `ModelConfig` that is written, if ours may be left to a default.
    """

    theirs: str
    ours: str
    default: Any
    kind: type | None = None
    words: tuple[tuple[Any, Any], ...] = ()
    resolved: str | None = None


class TensorLike(Protocol):
    """A tensor in a file: its shape, and its rows if they are asked for."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""

    def rows(self, rows: slice) -> Tensor:
        """Some of its rows (indexes of the first dim)."""


def as_told(model: ModelConfig, tensors: Mapping[str, TensorLike]) -> ModelConfig:
    """The model as ``config.json`` describes it."""
    return model


@dataclass(frozen=True)
class Limit:
    """What must hold for a model's shape so that both sides can have it.

    Attributes:
        holds: whether a shape meets it.
        words: what must hold, as in "`x` must be ...".
    """

    holds: Callable[[ModelConfig], bool]
    words: str


COMMON_LIMITS = (
    Limit(
        lambda m: m.num_attention_heads % m.kv_heads == 0,
        "the number of key/value heads must divide the number of query heads",
    ),
    Limit(
        lambda m: m.hidden_size % m.num_attention_heads == 0,
        "the hidden size must be a multiple of the number of heads",
    ),
)

# Fields that change what a model computes in ways that nothing here supports, unless null, false or empty.
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
class Architecture:
    """What megazero has to know about one architecture: a class of transformers that has weights.

    Classes of one ``model_type`` with different heads are several such values.

    Attributes:
        name: the class in transformers, as in ``architectures``.
        model_type: the value in ``config.json``.
        auto: the class that loads it without being told which one it is.
        prefix: what all tensor names but the head's start with; files of the bare model leave it out.
        rules: the tensors.
        copies: (name, name of the tensor that it equals); files may leave either out, unless the first is a
            tensor of its own here.
        blank: tensors that theirs has and ours has not; they are written as zeros, and must be zeros.
        ignored: regular expressions for buffers that are not weights.
        renamed: (regular expression, replacement) for names in older files.
        settings: fields of ``config.json``.
        fixed: (their field, the only value that ours supports), which a missing field means too.
        ours_fixed: (our field, the only value that theirs supports).
        training: (our field, value) that theirs always trains with; it changes no weight's meaning.
        limits: conditions on the shape.
        plain: returns ``config.json`` with nested or renamed fields turned into those of `settings`; raises
            ValueError, in words, if it asks for something that ours does not support.
        complete: the opposite, for writing.
        classifies: whether its models are classifiers, which have `num_classes`.
        seen: (model of ``config.json``, tensors of the folder by name) -> the model that they make, for what
            ``config.json`` does not say.
    """

    name: str
    model_type: str
    auto: str
    prefix: str
    rules: tuple[TensorRule, ...]
    copies: tuple[tuple[str, str], ...]
    ignored: tuple[str, ...]
    settings: tuple[FieldPair, ...]
    fixed: tuple[tuple[str, Any], ...] = ()
    ours_fixed: tuple[tuple[str, Any], ...] = ()
    training: tuple[tuple[str, Any], ...] = ()
    limits: tuple[Limit, ...] = COMMON_LIMITS
    plain: Callable[[Json], dict[str, Any]] = dict
    complete: Callable[[Json], dict[str, Any]] = dict
    blank: tuple[TensorRule, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()
    classifies: bool = False
    seen: Callable[[ModelConfig, Mapping[str, TensorLike]], ModelConfig] = as_told
