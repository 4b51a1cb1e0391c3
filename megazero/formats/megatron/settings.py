"""Reads the model's settings from Megatron's arguments, and refuses those that megazero lacks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from pydantic import ValidationError

from megazero.config.fields import names_with
from megazero.config.tree.model import ModelConfig
from megazero.config.tree.roles import Role
from megazero.errors import CheckpointError
from megazero.formats.megatron.dialects import UNSET, Arguments, ModelFields
from megazero.formats.megatron.hybrid import hybrid_settings
from megazero.formats.megatron.latent import latent_settings
from megazero.formats.pickles import PositionEmbedding

# Arguments for parts that megazero lacks: (name, values that are fine, the part that other values ask for).
_REFUSED: tuple[tuple[str, tuple[object, ...], str], ...] = (
    ("moe_apply_probs_on_input", UNSET, "weights of experts before their MLPs"),
    ("moe_latent_size", UNSET, "experts of another width than the model"),
    ("moe_n_hash_layers", (*UNSET, 0), "experts by the ids of tokens, whose table is in its checkpoint"),
    ("retro_add_retriever", UNSET, "RETRO"),
    ("qk_l2_norm", UNSET, "norms of queries and keys without weights"),
    ("attention_output_gate", UNSET, "gated attention"),
    ("experimental_attention_variant", UNSET, "another attention"),
    ("glu_activation", UNSET, "a gated activation other than SwiGLU"),
    ("onnx_safe", UNSET, "the GELU for ONNX"),
    ("mtp_use_repeated_layer", UNSET, "one layer that predicts all further tokens"),
    ("mtp_hybrid_override_pattern", UNSET, "further tokens predicted by a hybrid"),
    ("heterogeneous_layers_config_path", UNSET, "layers of different shapes"),
)
# Arguments that Megatron before Core lacks, or has under other names.
_OF_CORE = (*names_with(Role.MEGATRON_CORE), "quick_geglu")
# Settings of a gated activation: the offset of its values, and their bound.
GATED = ("glu_linear_offset", "activation_func_clamp_value")
EXPERTS = names_with(Role.MEGATRON | Role.EXPERTS)
_POSITIONS = MappingProxyType(
    {
        "learned_absolute": "learned_absolute",
        "rope": "rope",
        "yarn": "yarn",
        "none": "none",
        "alibi": "alibi",
        PositionEmbedding.absolute: "learned_absolute",
        PositionEmbedding.rotary: "rope",
        PositionEmbedding.alibi: "alibi",
    }
)
_SCALING = ("rotary_seq_len_interpolation_factor", "use_rope_scaling", "rope_scaling_factor")
_YARN = names_with(Role.YARN)
_SAME_NAME = tuple(name for name in names_with(Role.MEGATRON) if name not in EXPERTS)
COPIED = (*_SAME_NAME, *_SCALING, *_YARN)
"""The settings with the same name on both sides, except those of experts."""

_NORMS = MappingProxyType({"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"})


@dataclass(frozen=True)
class ModelSettings:
    """The settings of a model.

    Attributes:
        model: the model, without the vocabulary.
        vocab_size: entries before padding; None if the arguments do not say.
    """

    model: ModelConfig
    vocab_size: int | None


def read_settings(
    arguments: Arguments, *, family: Mapping[str, object], core: bool, names: Collection[str] = ()
) -> ModelSettings:
    """Read the settings of a checkpoint's model.

    Args:
        arguments: Megatron's arguments, by name.
        family: settings that follow from the tensors alone; see `family_settings`.
        core: whether it is a Megatron-Core model, for which some arguments mean something else.
        names: Core's names of the tensors, by which a hybrid is recognized too.

    Raises:
        CheckpointError: arguments are missing, or ask for a model that megazero lacks; all are listed.
    """
    wrong = [
        f"`{name}` is {arguments[name]!r} ({words})"
        for name, fine, words in _REFUSED
        if name in arguments and _comparable(arguments[name]) not in fine
    ]
    if core and arguments.get("apply_residual_connection_post_layernorm"):
        wrong.append(
            "`apply_residual_connection_post_layernorm` is True, which Core ignores (unset it with "
            "--megatron-args)"
        )
    if not core:
        wrong += [
            f"`{name}` is {arguments[name]!r}, which only Core has (unset it with --megatron-args)"
            for name in _OF_CORE
            if _comparable(arguments.get(name)) not in UNSET
        ]
    if arguments.get("apply_layernorm_1p") and (arguments.get("embed_layernorm") or (family and not core)):
        wrong.append(
            "`apply_layernorm_1p` is True (but not for all norms: those of embeddings, or of a head)"
        )
    fields: ModelFields = {n: arguments[n] for n in _SAME_NAME if arguments.get(n) is not None}
    fields |= family
    parts: tuple[Callable[[Arguments, bool], ModelFields], ...] = (
        _heads,
        _positions,
        _normalization,
        _activation,
        _attention,
        _experts,
        lambda arguments, _: hybrid_settings(names, arguments),
    )
    for part in parts:
        try:
            fields |= part(arguments, core)
        except ValueError as error:
            wrong.append(str(error))
    if fields.get("mtp_num_layers") and fields.get("position_embedding_type") == "learned_absolute":
        wrong.append(
            f"`mtp_num_layers` is {fields['mtp_num_layers']!r} (with learned positions, which further tokens "
            f"of ours do not read)"
        )
    if wrong:
        raise CheckpointError(
            "the checkpoint must hold a model that megazero supports, but " + "; ".join(wrong)
        )
    try:
        return ModelSettings(ModelConfig(**fields), _vocab_size(arguments))
    except ValidationError as error:
        wrong = [f"`{'.'.join(map(str, fault['loc']))}`: {fault['msg']}" for fault in error.errors()]
        raise CheckpointError(
            "Megatron's arguments must tell the model's shape, but do not: "
            + "; ".join(wrong)
            + "; add what is missing with --megatron-args"
        ) from error


def _comparable(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def _heads(arguments: Arguments, core: bool) -> ModelFields:
    # Megatron-LM stores `num_query_groups` 1 even without groups, and `kv_channels` even with latent
    # attention, which has sizes of its own.
    if arguments.get("multi_latent_attention"):
        return {"num_query_groups": None, "kv_channels": None}
    groups = arguments.get("num_query_groups") if arguments.get("group_query_attention") else None
    return {"num_query_groups": groups or arguments.get("num_key_value_heads")}


def _positions(arguments: Arguments, core: bool) -> ModelFields:
    kind = arguments.get("position_embedding_type", "learned_absolute")
    if arguments.get("use_rotary_position_embeddings"):
        kind = "rope"
    if not isinstance(kind, (str, PositionEmbedding)) or kind not in _POSITIONS:
        raise ValueError(f"`position_embedding_type` is {getattr(kind, 'name', kind)!r}")
    kind = _POSITIONS[kind]
    if kind == "learned_absolute" and arguments.get("add_position_embedding") is False:
        kind = "none"
    latent = latent_settings(arguments)
    if kind not in ("rope", "yarn") and not latent:
        return {"position_embedding_type": kind}
    read = _YARN if kind == "yarn" else _SCALING
    scaling = {name: arguments[name] for name in read if arguments.get(name) is not None}
    # Megatron-DeepSpeed and forks call the base theta; before it was configurable, it was 10000.
    bases = (arguments.get(name) for name in ("rotary_base", "rope_theta", "rotary_theta"))
    base = next((base for base in bases if base is not None), 10000.0)
    own = _turned_otherwise(arguments)
    if latent and own:
        raise ValueError(f"`{min(own)}` is {own[min(own)]!r} with latent attention")
    if latent:
        # YaRN is then a setting of latent attention's own RoPE, in `latent`.
        kind = "rope" if kind == "yarn" else kind
        return {"position_embedding_type": kind, "rotary_base": base, **latent}
    return {
        "position_embedding_type": kind,
        "rotary_base": base,
        # Core's YaRN rotates whole heads, whatever `rotary_percent` says.
        "rotary_percent": (kind == "rope" and arguments.get("rotary_percent")) or 1.0,
        **scaling,
        **own,
    }


def _turned_otherwise(arguments: Arguments) -> ModelFields:
    """Settings of interleaved RoPE and of layers without RoPE, if the arguments have them.

    Raises:
        ValueError: `no_rope_freq` is neither a list with a 1 for layers without RoPE, nor an interval.
    """
    own: ModelFields = {} if arguments.get("rotary_interleaved") in UNSET else {"rotary_interleaved": True}
    freq, layers = _comparable(arguments.get("no_rope_freq")), arguments.get("num_layers")
    if freq in UNSET:
        return own
    listed = isinstance(freq, tuple) and len(freq) == layers and {*freq} <= {0, 1}
    if not listed and not (
        isinstance(freq, int) and freq > 1 and isinstance(layers, int) and layers % freq == 0
    ):
        raise ValueError(f"`no_rope_freq` is {freq!r} of {layers!r} layers")
    return {**own, "no_rope_freq": freq}


def _normalization(arguments: Arguments, core: bool) -> ModelFields:
    kind = arguments.get("normalization") or "LayerNorm"
    if not isinstance(kind, str) or kind.lower() not in _NORMS:
        raise ValueError(f"`normalization` is {kind!r}")
    if arguments.get("apply_layernorm_1p") and not core and _NORMS[kind.lower()] == "RMSNorm":
        raise ValueError(
            "`apply_layernorm_1p` is True, which RMSNorm before Core ignores (unset it with --megatron-args)"
        )
    epsilon = arguments.get("layernorm_epsilon") or arguments.get("norm_epsilon") or 1e-5
    return {"normalization": _NORMS[kind.lower()], "norm_epsilon": epsilon}


def _activation(arguments: Arguments, core: bool) -> ModelFields:
    # Megatron's fused bias and GELU compute the tanh form, its unfused GELU the erf form. Its fused SwiGLU
    # ignores the settings of gated activations.
    gated = {name: arguments[name] for name in GATED if _comparable(arguments.get(name)) not in UNSET}
    named = ", ".join(f"`{name}` is {value!r}" for name, value in gated.items())
    overlapped = arguments.get("moe_shared_expert_intermediate_size") and arguments.get(
        "moe_shared_expert_overlap"
    )
    if gated and arguments.get("num_experts") and (overlapped or with_grouped_mlp(arguments)):
        raise ValueError(f"{named} (which `GroupedMLP` and overlapped shared experts ignore)")
    if arguments.get("quick_geglu"):
        if arguments.get("swiglu") or arguments.get("squared_relu"):
            raise ValueError(
                "`quick_geglu` is True beside another activation (unset one with --megatron-args)"
            )
        return {"activation": "quick_geglu", **gated}
    if gated:
        raise ValueError(f"{named} (without `quick_geglu`)")
    if arguments.get("swiglu"):
        return {"activation": "swiglu"}
    if arguments.get("squared_relu"):
        return {"activation": "squared_relu"}
    if arguments.get("openai_gelu"):
        if core:
            raise ValueError("`openai_gelu` is True, which Core ignores (unset it with --megatron-args)")
        return {"activation": "gelu"}
    fused = arguments.get("bias_gelu_fusion", True) and arguments.get("add_bias_linear", True)
    return {"activation": "gelu" if fused else "gelu_exact"}


def with_grouped_mlp(arguments: Arguments) -> bool:
    """Whether Core computes experts with its older `GroupedMLP`."""
    legacy = arguments.get("moe_use_legacy_grouped_gemm") or arguments.get("transformer_impl") == "local"
    return bool(arguments.get("moe_grouped_gemm") and legacy)


def _attention(arguments: Arguments, core: bool) -> ModelFields:
    # Without a window, the layers that it is for mean nothing.
    fields: ModelFields = {"softmax_type": arguments.get("softmax_type") or "vanilla"}
    window = arguments.get("window_size")
    if window in UNSET:
        return fields
    return {**fields, "window_size": window, "window_attn_skip_freq": arguments.get("window_attn_skip_freq")}


def _experts(arguments: Arguments, core: bool) -> ModelFields:
    if _comparable(arguments.get("num_experts")) in (*UNSET, 1, (1,)):
        return {}
    counts = arguments["num_experts"]
    if isinstance(counts, (list, tuple)) and len(set(counts)) > 1:
        raise ValueError(f"`num_experts` is {counts!r} (layers with different numbers of experts)")
    fields = {name: arguments[name] for name in EXPERTS if arguments.get(name) is not None}
    if fields.get("moe_layer_freq") == 1:  # the default, which megazero has as None
        del fields["moe_layer_freq"]
    # Megatron has one capacity factor, for training and evaluation.
    capacity = fields.get("moe_expert_capacity_factor")
    one = ("moe_router_load_balancing_type", "moe_aux_loss_coeff")
    listed = {
        n: fields[n] if isinstance(fields[n], (list, tuple)) else (fields[n],) for n in one if n in fields
    }
    return {**fields, **listed, **({} if capacity is None else {"moe_eval_capacity_factor": capacity})}


def _vocab_size(arguments: Arguments) -> int | None:
    # Megatron-LM stores the size only of a tokenizer without files.
    size = arguments.get("vocab_size")
    if arguments.get("tokenizer_type") == "NullTokenizer" and isinstance(size, int):
        return size + 1  # with the end-of-document token
    return None
