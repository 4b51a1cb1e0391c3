"""Rules about models whose layers have sizes of their own."""

from __future__ import annotations

from types import MappingProxyType

from megazero.config.condition import config
from megazero.config.fields import paths
from megazero.config.heterogeneous.shapes import LayerShape, facts_of
from megazero.config.rules.rule import Case, conditions, rule, unmet

_MODEL, _PARALLEL = paths.model, paths.parallel

_TEXT = _MODEL.heterogeneous_layers_config_encoded_json

# Only the plain decoder layer can have sizes of its own: these settings must keep to it.
_PLAIN = conditions(
    "layers_of_a_plain_gpt",
    config.model.family == "gpt",
    config.model.num_experts == (),
    config.model.is_hybrid_model.is_off,
    config.model.multi_latent_attention.is_off,
    config.model.mtp_num_layers.is_none,
    config.model.norm_position == "input",
    config.model.apply_residual_connection_post_layernorm.is_off,
    config.model.use_parallel_residual.is_off,
    config.distillation.kd.is_off,
)

_ACTIVATIONS = MappingProxyType(
    {
        **{"silu": "swiglu", "swish": "swiglu", "relu2": "squared_relu", "gelu": "gelu_exact"},
        **dict.fromkeys(("gelu_new", "gelu_pytorch_tanh", "gelu_fast"), "gelu"),
    }
)
"""Hugging Face's names of activations."""


def _shapes(case: Case) -> tuple[LayerShape, ...]:
    return case.model.layer_shapes or ()


def _uneven(case: Case) -> dict[int, LayerShape]:
    """The layers, by number, whose key/value heads or width the tensor-parallel size does not divide."""
    ranks = case.parallel.tensor_model_parallel_size
    return {n: s for n, s in enumerate(_shapes(case)) if s.groups % ranks or s.width % ranks}


def _first_uneven(case: Case) -> str:
    number, shape = next(iter(_uneven(case).items()))
    ranks = case.parallel.tensor_model_parallel_size
    sizes = f"{shape.groups} key/value heads and an inner width of {shape.width}"
    return f"layer {number} has {sizes} for {ranks} ranks"


def _broken_groups(case: Case) -> list[int]:
    """The numbers of layers whose key/value heads do not divide the query heads."""
    heads = case.model.num_attention_heads
    return [n for n, shape in enumerate(_shapes(case)) if shape.groups and heads % shape.groups]


def _facts_otherwise(case: Case) -> list[str]:
    """Clauses on the facts of the whole model in which the file and the settings differ."""
    model = case.model
    text = model.heterogeneous_layers_config_encoded_json
    llama3, linear = model.rope_scaling_factor, model.rotary_seq_len_interpolation_factor
    ours = {
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "head_dim": model.head_dim,
        "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
        "rope_theta": model.rotary_base,
        "rope_scaling": llama3 if model.use_rope_scaling else linear or model.rotary_scaling_factor,
        "hidden_act": model.activation,
        "rms_norm_eps": model.norm_epsilon,
        "attention_bias": model.add_bias_linear or model.add_qkv_bias,
        "mlp_bias": model.add_bias_linear,
    }
    said = {} if text is None else facts_of(text)
    return [
        f"`{name}` is {value} there and {ours[name]} here"
        for name, value in said.items()
        if (_ACTIVATIONS.get(str(value), value) if name == "hidden_act" else value) != ours[name]
    ]


@rule(
    (_MODEL.heterogeneous_layers_config_path, _TEXT),
    "leave one of `--heterogeneous-layers-config-path` and `--heterogeneous-layers-config-encoded-json` out",
    facts=lambda c: f"are by the file {c.model.heterogeneous_layers_config_path} and by a text",
)
def layers_given_once(case: Case) -> bool:
    """layers must be described by a file or by a text"""
    return case.model.heterogeneous_layers_config_path is None


@rule(
    (_TEXT, _MODEL.num_layers),
    "change one of the two, or leave `--num-layers` out",
    facts=lambda c: f"are {len(_shapes(c))} entries for {c.model.num_layers} layers",
)
def layers_given_are_all(case: Case) -> bool:
    """`block_configs` must have an entry for each of `num_layers`"""
    return not _shapes(case) or len(_shapes(case)) == case.model.num_layers


@rule(
    (_TEXT, *(condition.path for condition in _PLAIN)),
    "leave one of the two out",
    facts=lambda c: unmet(_PLAIN, c),
)
def layers_of_a_plain_gpt(case: Case) -> bool:
    """`heterogeneous_layers_config_encoded_json` must describe a GPT of attention and MLPs that read
    normalized inputs one after the other"""
    return not _shapes(case) or not unmet(_PLAIN, case)


@rule(
    (_TEXT, _MODEL.num_attention_heads),
    "change `num_query_groups` or `n_heads_in_group` of that layer",
    facts=lambda c: f"layer {_broken_groups(c)[0]} does not divide {c.model.num_attention_heads} heads so",
)
def layers_query_groups_divide_heads(case: Case) -> bool:
    """query heads of each layer must share keys in groups of one size"""
    return not _broken_groups(case)


@rule(
    (_TEXT, _PARALLEL.tensor_model_parallel_size),
    "use fewer tensor-parallel ranks, or change that layer",
    facts=_first_uneven,
)
def layers_over_tensor_ranks(case: Case) -> bool:
    """the key/value heads and the inner width of each layer must be multiples of
    `tensor_model_parallel_size`"""
    return not _uneven(case)


@rule(
    (
        _TEXT,
        _MODEL.num_layers,
        _MODEL.hidden_size,
        _MODEL.num_attention_heads,
        _MODEL.activation,
        _MODEL.rotary_base,
        _MODEL.norm_epsilon,
        _MODEL.untie_embeddings_and_output_weights,
    ),
    "give the flags that the file asks for",
    facts=lambda c: "; ".join(_facts_otherwise(c)),
)
def layers_given_fit_the_model(case: Case) -> bool:
    """settings of the whole model beside `block_configs` must equal those of the launch line"""
    return not _facts_otherwise(case)
