"""Whether the model that a description names can lie in the tensors beside it.

A description is a small file that anyone can write: it may name a million layers, or a width that no memory
holds. Whoever reads one looks here before anything is built from it, a table of names included. This bounds
what is built by the files that exist; whether each tensor fits is for later, when all names are known.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping

from megazero.checkpoint.naming import dim_sizes
from megazero.checkpoint.part import WEIGHT, Key
from megazero.config.derive import experts_of
from megazero.config.fields import FIELDS
from megazero.config.tree.experts import is_frequency
from megazero.config.tree.model import ModelConfig
from megazero.errors import CheckpointError

_LAYER = re.compile(r"layers\.([0-9]+)\.")


def check_saved_model(
    model: ModelConfig, vocab_size: int, shapes: Mapping[Key, tuple[int, ...]], where: object
) -> None:
    """`check_described` for a checkpoint of ours, given the shapes of its tensors.

    Raises:
        CheckpointError: as there.
    """
    weights = {key.name: shape for key, shape in shapes.items() if key.kind == WEIGHT}
    numbers = {match[1] for name in weights if (match := _LAYER.match(name))}
    check_described(model, max(vocab_size, model.vocab_size or 0), weights.values(), len(numbers), where)


def check_described(
    model: ModelConfig, vocab_size: int, shapes: Iterable[tuple[int, ...]], layers: int, where: object
) -> None:
    """Refuse a description of more than the tensors hold; takes no longer than going through these.

    Args:
        model, vocab_size: what the description says.
        shapes: of all tensors.
        layers: the most layers that they can be of.
        where: the description, for messages.

    Raises:
        CheckpointError: it names more layers, a size that no tensor has room for, or more weights.
    """
    # Those that predict further tokens are among them, and those without any part are not.
    if (number := model.further_layers.stop - model.num_layers + model.layers_of("*-ME")) > layers:
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
    if model.layer_parts is not None and len(model.layer_parts) != model.num_layers:
        raise _refusal(where, f"its pattern is of other than {model.num_layers} layers")
    if len(model.num_experts) not in (0, 1, model.expert_places):
        raise _refusal(
            where,
            f"`num_experts` is of {len(model.num_experts)} layers, and {model.expert_places} have experts",
        )
    elements = [math.prod(shape) for shape in shapes]
    largest, total = max(elements, default=0), sum(elements)
    sizes = dict(dim_sizes(model, vocab_size))
    for letter in _unused(model):
        del sizes[letter]
    for spec in FIELDS:
        if spec.dim and (size := sizes.get(spec.dim, 0)) > largest:
            raise _refusal(where, f"`{spec.name}` makes {size}, and none has more than {largest} elements")
    if (least := _least_elements(model, vocab_size)) > total:
        raise _refusal(where, f"it makes at least {least} weights, and they hold {total}")


def _unused(model: ModelConfig) -> str:
    """Letters of the dims that no tensor of the model need have."""
    experts = model.expert_places if model.num_experts else 0
    dense = model.layers_of("-E") > experts
    unused = "" if model.position_embedding_type == "learned_absolute" else "p"
    unused += "" if dense and model.layer_shapes is None else "f"
    unused += "" if model.layers_of("*") else "gda"
    return unused + ("" if model.num_experts else "m")


def _least_elements(model: ModelConfig, vocab_size: int) -> int:
    """A lower bound of the number of weights: those of all matrices but routers."""
    hidden, learned = model.hidden_size, model.position_embedding_type == "learned_absolute"
    headed = model.untie_embeddings_and_output_weights and model.num_classes is None
    rows = vocab_size * (2 if headed else 1)
    rows += (model.positions if learned else 0) + (model.num_classes or 0)
    summed = model.summed
    mixers = 2 * model.head_dim * (model.layers_of("*") * model.num_attention_heads + summed.groups)
    if model.multi_latent_attention:  # those that a hidden state goes through
        queries = model.q_lora_rank or model.num_attention_heads * model.head_dim
        values = model.num_attention_heads * model.v_head_dim
        mixers = model.layers_of("*") * (queries + model.kv_lora_rank + values)
    counts = [experts_of(model, layer) for layer in range(model.num_layers)] if model.num_experts else []
    placed = sum(count > 0 for count in counts)
    beside = placed if model.mlp_type == "residual" else 0  # MLPs of an expert's width
    widths = summed.width - placed * model.ffn_size
    widths += (sum(counts) + beside) * model.expert_ffn_size
    widths += placed * (model.moe_shared_expert_intermediate_size or 0)
    matrices = 3 if model.gated else 2
    mixers += model.layers_of("M") * (model.mamba_rows + model.mamba_width) if model.is_hybrid_model else 0
    return hidden * (rows + matrices * widths + mixers)


def _refusal(where: object, what: str) -> CheckpointError:
    return CheckpointError(f"`{where}` must describe the tensors beside it, but {what}; use another model")
