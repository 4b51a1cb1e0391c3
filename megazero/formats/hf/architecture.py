"""An architecture of transformers: its tensors and ``config.json`` as tables for both directions."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import Tensor

from megazero.checkpoint.naming import TensorRule, biased, named_in, qkv_biased
from megazero.config.tree.model import ModelConfig

Json = Mapping[str, Any]
"""The fields of a ``config.json``."""

JsonObject = dict[str, Any]
"""The fields of a ``config.json`` that is being made."""

Rewrite = Callable[[Json], JsonObject]
"""Turns the fields of a ``config.json`` into other fields."""

OWN_CODE = "auto_map"
GENERATING = "AutoModelForCausalLM"
"""`Architecture.auto` of classes that generate text."""


def same(value: object) -> object:
    """Return the value itself."""
    return value


@dataclass(frozen=True)
class FieldPair:
    """A field of ``config.json`` and the field of `ModelConfig` with the same meaning.

    Attributes:
        theirs: the name in ``config.json``.
        ours: the name in `ModelConfig`.
        default: the value that transformers assumes if ``config.json`` lacks the field; its type is the
            field's type.
        kind: the field's type, if the default is None.
        words: (their value, our value), if the words differ; the first pair with our value is written.
        resolved: the property of `ModelConfig`, or the function of a model, whose value is written; for
            fields that may be unset in `ModelConfig`, or have another form there.
        taken: their value -> our value, if the form of a number or list differs.
    """

    theirs: str
    ours: str
    default: object
    kind: type | None = None
    words: tuple[tuple[object, object], ...] = ()
    resolved: str | Callable[[ModelConfig], object] | None = None
    taken: Callable[[Any], Any] = same

    def written(self, model: ModelConfig) -> object:
        """The value to write into ``config.json`` for a model that the architecture can express."""
        if callable(self.resolved):
            return self.resolved(model)
        value = getattr(model, self.resolved or self.ours)
        return {ours: theirs for theirs, ours in reversed(self.words)}[value] if self.words else value


TIED = FieldPair(
    "tie_word_embeddings",
    "untie_embeddings_and_output_weights",
    False,
    words=((True, False), (False, True)),
)
GELUS = (
    ("gelu_new", "gelu"),
    ("gelu_pytorch_tanh", "gelu"),
    ("gelu_fast", "gelu"),
    ("gelu", "gelu_exact"),
    ("relu2", "squared_relu"),
)


@dataclass(frozen=True)
class Constant:
    """A tensor of theirs, by its rule, that is a number in ours; `rule.ours` is a name that no tensor has."""

    rule: TensorRule
    number: float


class TensorLike(Protocol):
    """A tensor in a file, read by rows."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor."""

    def rows(self, rows: slice) -> Tensor:
        """Read rows, given as indexes of the first dim."""


def as_told(model: ModelConfig, tensors: Mapping[str, TensorLike]) -> ModelConfig:
    """Return the model as ``config.json`` describes it, whatever the tensors are."""
    return model


def pair(ours: str, theirs: str, dims: str = "h", their_dims: str | None = None) -> tuple[TensorRule, ...]:
    """Rules for weight and bias of a norm or of a linear layer, whose bias has all dims but the last."""
    their_dims = their_dims or dims
    weight = TensorRule(f"{ours}.weight", dims, f"{theirs}.weight", their_dims)
    if " " not in dims:
        return weight, replace(weight, ours=f"{ours}.bias", theirs=f"{theirs}.bias")
    rows, their_rows = dims.rpartition(" ")[0], their_dims.rpartition(" ")[0]
    return weight, TensorRule(f"{ours}.bias", rows, f"{theirs}.bias", their_rows, when=biased)


def separate(theirs: str, *names: str) -> tuple[TensorRule, ...]:
    """Rules for separate matrices and biases of queries, keys and values: `names` of the module `theirs`."""
    slots = slice(0, -2), slice(-2, -1), slice(-1, None)
    return tuple(
        replace(rule, take=("s", slot), when=qkv_biased if rule.when is biased else rule.when)
        for name, slot in zip(names, slots, strict=True)
        for rule in pair("layers.{i}.attention.qkv", f"{theirs}.{name}", "g s d h", "(g s d) h")
    )


def layers_of(config: Json, default: int) -> int:
    """The number of layers in ``config.json``, or the `default` that transformers assumes.

    Raises:
        ValueError: the value is not a positive number, or too large to make lists of.
    """
    layers = config.get("num_hidden_layers", default)
    if type(layers) is not int or not 0 < layers <= _MOST_LAYERS:
        raise ValueError(f"`num_hidden_layers` must be 1 to {_MOST_LAYERS}, but is {layers!r:.40}")
    return layers


def without_own_code(config: Json) -> dict[str, object]:
    """Drop ``auto_map``, by which older folders name code of their own for a model now in transformers."""
    return {field: value for field, value in config.items() if field != OWN_CODE}


@dataclass(frozen=True)
class Limit:
    """A condition on a model that is needed by transformers' class or by megazero.

    Attributes:
        holds: whether a model meets the condition.
        words: the condition in words, as in "`x` must be ...".
    """

    holds: Callable[[ModelConfig], bool]
    words: str


PLAIN_EMBEDDING = Limit(lambda m: not m.embed_layernorm, "there must be no norm of the embedding")
COMMON_LIMITS = (
    PLAIN_EMBEDDING,
    Limit(
        lambda m: m.num_attention_heads % m.kv_heads == 0,
        "the number of key/value heads must divide the number of query heads",
    ),
    Limit(
        lambda m: m.hidden_size % m.num_attention_heads == 0,
        "the hidden size must be a multiple of the number of heads",
    ),
    Limit(
        lambda m: not m.has_windows or not m.window_sink_tokens,
        "a window must hide the first tokens too, without `window_sink_tokens`",
    ),
)
DENSE_LIMITS = (*COMMON_LIMITS, Limit(lambda m: not m.num_experts, "there must be no experts"))

UNGROUPED = Limit(
    lambda m: m.kv_heads == m.num_attention_heads,
    "the number of key/value heads must equal the number of query heads",
)
PLAIN_HEADS = Limit(
    lambda m: m.head_dim * m.num_attention_heads == m.hidden_size,
    "the width of a head must be hidden size / heads",
)
_MOST_LAYERS = 10_000

# Fields that must be null, false or empty, because megazero has nothing that computes what they ask for.
NEVER = (
    "pruned_heads",
    "sliding_window",
    "use_sliding_window",
    "add_cross_attention",
    "is_encoder_decoder",
    OWN_CODE,
)


@dataclass(frozen=True)
class Architecture:
    """One class of transformers, as tables for reading and writing its folders.

    A ``model_type`` whose classes have different heads has several architectures. In all tables, "theirs" is
    transformers' and "ours" is megazero's.

    Attributes:
        name: the class in transformers, as in ``architectures``.
        model_type: the value in ``config.json``.
        auto: transformers' class that picks this one by itself, such as AutoModelForCausalLM.
        prefix: the beginning of all tensor names but the head's; files of the bare model leave it out.
        rules: the tensors.
        stacked: rules for a second form of some tensors, with all experts in one. They replace the rules for
            the same tensors of ours if a file has their names.
        copies: (name, name of the equal tensor); files may lack either, unless the first is a tensor of its
            own in this model.
        fused: (their tensor, the tensors of `rules` and `blank` whose rows it concatenates, in order), by
            layer; a layer without any of these has no such tensor.
        blank: tensors that only theirs has. They are written as zeros; when they are read, `seen` refuses
            those that would change a result. A `Constant` is written as its number, and other numbers are
            refused.
        ignored: regular expressions for buffers that are not weights. One with the group `further`, a layer's
            number, matches tensors of layers behind the model's own, which transformers drops too.
        renamed: (regular expression, replacement) for names in older files.
        settings: fields of ``config.json``.
        fixed: (their field, the only value that ours supports); a missing field means that value.
        ours_fixed: (our field, the only value that theirs supports).
        implied: (our field, value) to set when reading and not to check when writing: transformers always
            trains so, or the field matters only beside another one.
        limits: conditions on the model.
        plain: rewrites ``config.json`` so that nested or renamed fields become those of `settings`; raises
            ValueError, in words, for what ours does not support.
        complete: the inverse of `plain`, for writing.
        classifies: whether its models are classifiers, which have `num_classes`.
        seen: (model of ``config.json``, tensors of the folder by name) -> the model, for facts that only the
            tensors show; raises ValueError, in words, for what ours does not support.
    """

    name: str
    model_type: str
    auto: str
    prefix: str
    rules: tuple[TensorRule, ...]
    copies: tuple[tuple[str, str], ...]
    ignored: tuple[str, ...]
    settings: tuple[FieldPair, ...]
    fixed: tuple[tuple[str, object], ...] = ()
    ours_fixed: tuple[tuple[str, object], ...] = ()
    implied: tuple[tuple[str, object], ...] = ()
    limits: tuple[Limit, ...] = DENSE_LIMITS
    plain: Callable[[Json], dict[str, object]] = dict
    complete: Callable[[Json], dict[str, Any]] = dict
    stacked: tuple[TensorRule, ...] = ()
    fused: tuple[tuple[str, tuple[str, ...]], ...] = ()
    blank: tuple[TensorRule | Constant, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()
    classifies: bool = False
    seen: Callable[[ModelConfig, Mapping[str, TensorLike]], ModelConfig] = as_told

    @property
    def without_ours(self) -> tuple[TensorRule, ...]:
        """The tensors that theirs has without a tensor of ours."""
        return tuple(blank.rule if isinstance(blank, Constant) else blank for blank in self.blank)

    @property
    def constants(self) -> tuple[Constant, ...]:
        """The blank tensors that are one number in every model."""
        return tuple(blank for blank in self.blank if isinstance(blank, Constant))

    @property
    def named(self) -> frozenset[str]:
        """The fields of `ModelConfig` that the tables name."""
        pairs = (*self.ours_fixed, *self.implied)
        return frozenset([*(field for field, _ in pairs), *(setting.ours for setting in self.settings)])

    def rules_for(self, names: Iterable[str]) -> tuple[TensorRule, ...]:
        """The rules for a file with tensors of these names: `rules`, or `stacked` where the names match."""
        held = tuple(names)
        stacked = [rule for rule in self.stacked if _is_held(rule, held)]
        replaced = {rule.ours for rule in stacked}
        kept: list[TensorRule] = []
        for rule in self.rules:
            if rule.ours not in replaced:
                kept.append(rule)
            elif not any(other.ours == rule.ours for other in kept):
                kept += [other for other in stacked if other.ours == rule.ours]
        return tuple(kept)

    def fused_in(self, layers: int) -> Iterator[tuple[str, tuple[str, ...]]]:
        """`fused` for every layer; a tensor outside the layers is given once."""
        for whole, parts in self.fused:
            for number in range(layers if "{i" in whole else 1):
                yield named_in(whole, number), tuple(named_in(part, number) for part in parts)


def _is_held(rule: TensorRule, names: Iterable[str]) -> bool:
    """Whether the rule names a tensor, of any layer, that is among the names."""
    pattern = re.compile(re.escape(rule.theirs).replace(re.escape("{i}"), r"\d+"))
    return any(pattern.fullmatch(name) for name in names)
