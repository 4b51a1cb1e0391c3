"""DeepSeek's additions, latent attention and multi-token prediction: Megatron's names and arguments.

In Megatron the first block for multi-token prediction is ``mtp.layers.0``; in megazero its layer has the
number behind the model's last layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from megazero.config.fields import names_with
from megazero.config.tree.model import ModelConfig
from megazero.config.tree.roles import Role
from megazero.formats.megatron.dialects import BLOCK, UNSET, Arguments, ModelFields, renumbered
from megazero.spec.model import LayerSpec
from megazero.spec.parts import LatentAttentionSpec

_SAME = names_with(Role.LATENT)
# (our setting, name in Megatron-Core's configuration); Megatron-LM has no arguments for these.
_YARN = (
    ("yarn_original_max_position_embeddings", "original_max_position_embeddings"),
    ("yarn_beta_fast", "beta_fast"),
    ("yarn_beta_slow", "beta_slow"),
)
_SCALING = ("rotary_scaling_factor", "mscale", "mscale_all_dim")
_IGNORED = ("softmax_scale", "rotary_seq_len_interpolation_factor", "use_rope_scaling")

Row = tuple[str, str, str, str, str | None, Callable[[LayerSpec], bool]]
"""Our name and dims, Megatron's name and dims, the dim that ranks split, and which layers have it."""


def with_latent(layer: LayerSpec) -> bool:
    """Whether a tensor is present: in latent attention."""
    return isinstance(layer.attention, LatentAttentionSpec)


def _small_queries(layer: LayerSpec) -> bool:
    part = layer.attention
    return isinstance(part, LatentAttentionSpec) and part.query_rank is not None


def latent_rows() -> Iterator[Row]:
    """The matrices of latent attention, with names within a layer's attention."""
    yield (
        "query",
        "q d r",
        "linear_q_proj",
        "(q d) r",
        "q",
        lambda layer: with_latent(layer) and not _small_queries(layer),
    )
    yield "query_down", "r h", "linear_q_down_proj", "r h", None, _small_queries
    yield "query", "q d r", "linear_q_up_proj", "(q d) r", "q", _small_queries
    yield "latent_down", "z h", "linear_kv_down_proj", "z h", None, with_latent
    yield "latent_up", "q y l", "linear_kv_up_proj", "(q y) l", "q", with_latent


def latent_norms() -> Iterator[tuple[str, str, str]]:
    """The norms of compressed vectors: our name, Megatron's, the dim."""
    yield "query_norm", "q_layernorm", "r"
    yield "latent_norm", "kv_layernorm", "l"


def latent_settings(arguments: Arguments) -> ModelFields:
    """The settings of latent attention, which has a RoPE of its own; empty for models without it.

    Raises:
        ValueError: an argument is set that Core ignores with latent attention, or that megazero lacks.
    """
    if arguments.get("multi_latent_attention") in UNSET:
        return {}
    for name in _IGNORED:
        if arguments.get(name) not in UNSET:
            raise ValueError(
                f"`{name}` is {arguments[name]!r}, which latent attention ignores (unset it with "
                f"--megatron-args)"
            )
    kind = arguments.get("rope_type") or "yarn"
    fields: ModelFields = {"multi_latent_attention": True, "rotary_percent": 1.0}
    fields["rope_type"] = arguments.get("rope_type")
    fields |= {name: arguments[name] for name in _SAME if arguments.get(name) is not None}
    scaling = {name: arguments[name] for name in _SCALING if arguments.get(name) is not None}
    if kind == "rope":
        if arguments.get("rotary_percent") not in (None, 1):
            raise ValueError(f"`rotary_percent` is {arguments['rotary_percent']!r} with latent attention")
        if scaling.get("rotary_scaling_factor", 1) != 1 and scaling.get("mscale_all_dim"):
            raise ValueError(
                f"`rotary_scaling_factor` is {scaling['rotary_scaling_factor']!r} with `rope_type` rope, by "
                f"which Core makes attention sharper"
            )
        return fields
    yarn = {ours: arguments[name] for ours, name in _YARN if arguments.get(name) is not None}
    return {**fields, **scaling, **yarn}


def latent_arguments(model: ModelConfig) -> dict[str, object]:
    """Megatron's arguments for latent attention; empty for models without it."""
    if not model.multi_latent_attention:
        return {}
    named = {name: getattr(model, name) for name in (*_SAME, "multi_latent_attention")}
    yarn = {theirs: getattr(model, ours) for ours, theirs in _YARN}
    return {**named, **yarn, "rope_type": model.rope_type, "group_query_attention": False}


def further_rows() -> Iterator[tuple[str, str, str, str, str | None]]:
    """The matrices of a block for multi-token prediction besides its layer: the first columns of a `Row`."""
    yield "join.weight", "e j", "eh_proj.weight", "e j", "e"


def further_norms() -> Iterator[tuple[str, str]]:
    """The norms of a block besides its layer: our name, Megatron's."""
    yield "word_norm", "enorm"
    yield "hidden_norm", "hnorm"
    yield "final_norm", "final_layernorm"


def further_name(name: str, layers: int, inside: str = "") -> str:
    """Megatron's name of a tensor of a layer that is numbered behind the model's own `layers`."""
    return renumbered(name, lambda number: f"{BLOCK}{number - layers}.{inside}")
