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
OWN_CODE = "auto_map"
GENERATING = "AutoModelForCausalLM"
"""`Architecture.auto` of those that generate text."""


def same(value: Any) -> Any:
    """Return the value itself."""
    return value


@dataclass(frozen=True)
class FieldPair:
    """A field of ``config.json`` and our field that says the same.

    Attributes:
        theirs: its name there.
        ours: its name in `ModelConfig`.
        default: what transformers assumes if ``config.json`` lacks the field; its type is the field's.
        kind: the field's type, if the default is None.
        words: (their value, ours), if the values differ; the first pair with our value is what is written.
        resolved: the property of `ModelConfig` that is written, if ours may be left to a default, or a
            function of the model that gives it.
        taken: (their value) -> ours, if the values of a number or list differ in form.
    """

    theirs: str
    ours: str
    default: Any
    kind: type | None = None
    words: tuple[tuple[Any, Any], ...] = ()
    resolved: str | Callable[[ModelConfig], Any] | None = None
    taken: Callable[[Any], Any] = same

    def written(self, model: ModelConfig) -> Any:
        """The value of ``config.json`` for a model that the architecture can express."""
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
    """A tensor in a file: its shape, and its rows if they are asked for."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor."""

    def rows(self, rows: slice) -> Tensor:
        """Some of its rows (indexes of the first dim)."""


def as_told(model: ModelConfig, tensors: Mapping[str, TensorLike]) -> ModelConfig:
    """The model as ``config.json`` describes it."""
    return model


def pair(ours: str, theirs: str, dims: str = "h", their_dims: str | None = None) -> tuple[TensorRule, ...]:
    """The weight and the bias of a norm, or of a linear layer, whose bias lacks the last dim."""
    their_dims = their_dims or dims
    weight = TensorRule(f"{ours}.weight", dims, f"{theirs}.weight", their_dims)
    if " " not in dims:
        return weight, replace(weight, ours=f"{ours}.bias", theirs=f"{theirs}.bias")
    rows, their_rows = dims.rpartition(" ")[0], their_dims.rpartition(" ")[0]
    return weight, TensorRule(f"{ours}.bias", rows, f"{theirs}.bias", their_rows, when=biased)


def separate(theirs: str, *names: str) -> tuple[TensorRule, ...]:
    """Matrices of queries, keys and values, which `theirs` has under these names, and their biases."""
    slots = slice(0, -2), slice(-2, -1), slice(-1, None)
    return tuple(
        replace(rule, take=("s", slot), when=qkv_biased if rule.when is biased else rule.when)
        for name, slot in zip(names, slots, strict=True)
        for rule in pair("layers.{i}.attention.qkv", f"{theirs}.{name}", "g s d h", "(g s d) h")
    )


def layers_of(config: Json, default: int) -> int:
    """The number of layers that ``config.json`` says, or that transformers assumes.

    Raises:
        ValueError: it is none, or too large to list them.
    """
    layers = config.get("num_hidden_layers", default)
    if type(layers) is not int or not 0 < layers <= _MOST_LAYERS:
        raise ValueError(f"`num_hidden_layers` must be 1 to {_MOST_LAYERS}, but is {layers!r:.40}")
    return layers


def without_own_code(config: Json) -> dict[str, Any]:
    """`config` of an architecture that older folders came with the code of, which is in transformers now."""
    return {field: value for field, value in config.items() if field != OWN_CODE}


@dataclass(frozen=True)
class Limit:
    """A condition on a model's shape, without which one of the two sides cannot have it.

    Attributes:
        holds: whether a shape meets it.
        words: what must hold, as in "`x` must be ...".
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

# Fields that change what a model computes in ways that nothing here supports, unless null, false or empty.
NEVER = (
    "quantization_config",
    "pruned_heads",
    "sliding_window",
    "use_sliding_window",
    "add_cross_attention",
    "is_encoder_decoder",
    OWN_CODE,
)


@dataclass(frozen=True)
class Architecture:
    """One architecture, as megazero has to know it: a class of transformers that has weights.

    Classes of one ``model_type`` with different heads are several such values.

    Attributes:
        name: the class in transformers, as in ``architectures``.
        model_type: the value in ``config.json``.
        auto: the class that loads it without being told which one it is.
        prefix: what all tensor names but the head's start with; files of the bare model leave it out.
        rules: the tensors.
        stacked: for tensors that files may also hold in another form, all experts in one: the rules of that
            form. They take the place of the rules for the same tensors of ours where a file has their names.
        copies: (name, name of the tensor that it equals); files may leave either out, unless the first is a
            tensor of its own here.
        fused: (their tensor, those of `rules` and `blank` that it holds one below the other, in order of
            rows), by layer; layers that have none of these have no such tensor.
        blank: tensors that theirs has and ours has not; they are written as zeros. `seen` refuses others, if
            they would change a result. A `Constant` is written as its number, and other numbers are refused.
        ignored: regular expressions for buffers that are not weights. Where one has the group `further`, the
            number of a layer, it is for a tensor of layers behind the model's, which transformers leaves out.
        renamed: (regular expression, replacement) for names in older files.
        settings: fields of ``config.json``.
        fixed: (their field, the only value that ours supports), which a missing field means too.
        ours_fixed: (our field, the only value that theirs supports).
        implied: (our field, value) that reading sets and writing does not ask for: theirs always trains so,
            or it matters only beside another field.
        limits: conditions on the shape.
        plain: returns ``config.json`` with nested or renamed fields turned into those of `settings`; raises
            ValueError, in words, if it asks for something that ours does not support.
        complete: the opposite, for writing.
        classifies: whether its models are classifiers, which have `num_classes`.
        seen: (model of ``config.json``, tensors of the folder by name) -> the model that they make, for what
            ``config.json`` does not say; raises ValueError, in words, if ours does not support that.
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
    implied: tuple[tuple[str, Any], ...] = ()
    limits: tuple[Limit, ...] = DENSE_LIMITS
    plain: Callable[[Json], dict[str, Any]] = dict
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
        """Our fields that its tables name."""
        pairs = (*self.ours_fixed, *self.implied)
        return frozenset([*(field for field, _ in pairs), *(setting.ours for setting in self.settings)])

    def rules_for(self, names: Iterable[str]) -> tuple[TensorRule, ...]:
        """The rules for a file that holds tensors of these names."""
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
        """`fused` with the numbers of layers; what lies in no layer is there once."""
        for whole, parts in self.fused:
            for number in range(layers if "{i" in whole else 1):
                yield named_in(whole, number), tuple(named_in(part, number) for part in parts)


def _is_held(rule: TensorRule, names: Iterable[str]) -> bool:
    """Whether a tensor of any layer by this rule is among the names."""
    pattern = re.compile(re.escape(rule.theirs).replace(re.escape("{i}"), r"\d+"))
    return any(pattern.fullmatch(name) for name in names)
