"""Check that a described model is no larger than the tensors beside its description.

A description is a small file that anyone can write: it may name a million layers, or a width that no memory
holds. Every reader calls this before it builds anything from one, even a table of names, so that work and
memory are bounded by the files that exist. Whether each tensor fits is checked later, by name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping

from megazero.checkpoint.part import WEIGHT, Key
from megazero.config.tree.experts import is_frequency
from megazero.config.tree.model import ModelConfig
from megazero.errors import CheckpointError
from megazero.spec.experts import MoeSpec
from megazero.spec.model import LayerSpec, ModelSpec
from megazero.spec.parts import AttentionSpec, LatentAttentionSpec, MlpSpec
from megazero.spec.resolve import model_spec

_LAYER = re.compile(r"layers\.([0-9]+)\.")


def check_saved_model(
    model: ModelConfig, vocab_size: int, shapes: Mapping[Key, tuple[int, ...]], where: object
) -> None:
    """Call `check_described` for a megazero checkpoint, given the shapes of its tensors.

    Raises:
        CheckpointError: see `check_described`.
    """
    weights = {key.name: shape for key, shape in shapes.items() if key.kind == WEIGHT}
    numbers = {match[1] for name in weights if (match := _LAYER.match(name))}
    check_described(model, max(vocab_size, model.vocab_size or 0), weights.values(), len(numbers), where)


def check_described(
    model: ModelConfig, vocab_size: int, shapes: Iterable[tuple[int, ...]], layers: int, where: object
) -> None:
    """Refuse a description of a larger model than the tensors hold, in time linear in their number.

    Args:
        model, vocab_size: the described model.
        shapes: the shapes of all tensors.
        layers: the largest number of layers that the tensors can belong to.
        where: the description, for messages.

    Raises:
        CheckpointError: the model has more layers, a dim larger than any tensor, or more weights.
    """
    shapes_of = model.layer_shapes
    whole = model.num_layers if shapes_of is None else sum(bool(s.groups or s.width) for s in shapes_of)
    # Layers for multi-token prediction have tensors too; heterogeneous layers without any part have none.
    if (number := len(model.further_layers) + whole) > layers:
        raise _refusal(where, f"`num_layers` makes {number}, and they are of at most {layers}")
    pattern = model.moe_layer_freq or (1,)
    if not is_frequency(pattern) and len(pattern) != model.num_layers:
        raise _refusal(
            where, f"`moe_layer_freq` is of {len(pattern)} layers, and there are {model.num_layers}"
        )
    for name in ("window_attn_skip_freq", "no_rope_freq"):
        marks = getattr(model, name) or (1,)
        if len(marks) not in (1, model.num_layers):
            raise _refusal(where, f"`{name}` is of {len(marks)} layers, and there are {model.num_layers}")
    parts = model.layer_kinds or shapes_of
    if parts is not None and len(parts) != model.num_layers:
        raise _refusal(where, f"its pattern is of other than {model.num_layers} layers")
    if len(model.num_experts) not in (0, 1, model.expert_places):
        raise _refusal(
            where,
            f"`num_experts` is of {len(model.num_experts)} layers, and {model.expert_places} have experts",
        )
    elements = [math.prod(shape) for shape in shapes]
    largest, total = max(elements, default=0), sum(elements)
    spec = model_spec(model)
    for setting, size in (*_ends(spec, vocab_size), *(s for layer in spec.layers for s in _sizes(layer))):
        if size > largest:
            raise _refusal(where, f"`{setting}` makes {size}, and none has more than {largest} elements")
    if (least := _least_elements(spec, vocab_size)) > total:
        raise _refusal(where, f"it makes at least {least} weights, and they hold {total}")


Size = tuple[str, int]
"""A setting, and the size of the dim that it sets; some tensor must be that large."""


def _ends(spec: ModelSpec, vocab_size: int) -> Iterator[Size]:
    yield "vocab_size", vocab_size
    yield "max_position_embeddings", spec.embedding.positions
    yield "hidden_size", spec.stream.width
    yield "num_classes", spec.head.classes or 0


def _sizes(layer: LayerSpec) -> Iterator[Size]:
    if (attention := layer.attention) is not None:
        yield "num_query_groups", attention.groups
        yield "kv_channels", attention.head_dim
        yield "num_attention_heads", attention.heads * attention.value_dim
    match layer.mlp:
        case MlpSpec(width=width):
            yield "ffn_hidden_size", width
        case MoeSpec(experts=experts, expert=expert, shared=shared):
            yield "num_experts", experts
            yield "moe_ffn_hidden_size", expert.width
            yield "moe_shared_expert_intermediate_size", 0 if shared is None else shared.width


def _least_elements(spec: ModelSpec, vocab_size: int) -> int:
    """A lower bound of the number of weights: all matrices but the routers'."""
    hidden, classes = spec.stream.width, spec.head.classes
    rows = vocab_size * (1 if spec.head.tied or classes is not None else 2)
    return hidden * (rows + spec.embedding.positions + (classes or 0) + sum(map(_least_rows, spec.layers)))


def _least_rows(layer: LayerSpec) -> int:
    """A lower bound of the layer's rows of hidden width, summed over its matrices."""
    rows = 0
    match layer.attention:
        case LatentAttentionSpec(heads=heads, rank=rank, query_rank=narrow):  # only matrices [.., hidden]
            rows += (narrow or heads * layer.attention.head_dim) + rank + heads * layer.attention.value_dim
        case AttentionSpec(heads=heads, groups=groups, head_dim=width):
            rows += 2 * width * (heads + groups)
    if layer.mixer is not None:
        rows += layer.mixer.rows + layer.mixer.width
    match layer.mlp:
        case MlpSpec(width=width):
            rows += (3 if layer.mlp.activation.gated else 2) * width
        case MoeSpec(experts=experts, expert=expert, shared=shared, dense=dense):
            beside = sum(mlp.width for mlp in (shared, dense) if mlp is not None)
            rows += (3 if expert.activation.gated else 2) * (experts * expert.width + beside)
    return rows


def _refusal(where: object, what: str) -> CheckpointError:
    return CheckpointError(f"`{where}` must describe the tensors beside it, but {what}; use another model")
