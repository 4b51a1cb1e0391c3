"""T5 (Raffel et al. 2020) as transformers' T5ForConditionalGeneration: 1.0, 1.1 and their descendants.

megazero numbers layers through encoder and decoder. The table of relative biases, which all layers of a stack
share, is in the stack's first layer in transformers. Newer releases no longer write whether the head is tied,
but whether the decoder's outputs are scaled, which a tied head needs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from megazero.checkpoint.naming import TensorRule, untied
from megazero.config.tree.model import ModelConfig
from megazero.formats.hf.architecture import (
    PLAIN_EMBEDDING,
    UNGROUPED,
    Architecture,
    FieldPair,
    Limit,
    TensorLike,
    separate,
)
from megazero.spec.model import LayerSpec, ModelSpec
from megazero.spec.parts import MlpSpec

_OURS = "layers.{i}"
_TIED, _SCALED, _HEAD = "tie_word_embeddings", "scale_decoder_outputs", "lm_head.weight"
_FIRST, _SECOND = ("2", slice(0, 1)), ("2", slice(1, 2))


def _decodes(layer: LayerSpec) -> bool:
    return layer.cross is not None


def _is_gated(spec: ModelSpec) -> bool:
    return any(isinstance(layer.mlp, MlpSpec) and layer.mlp.activation.gated for layer in spec.layers)


def _layer(theirs: str, mlp: int, layer: Callable[[LayerSpec], bool]) -> tuple[TensorRule, ...]:
    """The rules of an encoder's or a decoder's layer, in which the MLP is module number `mlp`."""
    attention, dense = f"{theirs}.0.SelfAttention", f"{theirs}.{mlp}.DenseReluDense"
    up = f"{_OURS}.mlp.up.weight"
    return (
        TensorRule(f"{_OURS}.input_norm.weight", "h", f"{theirs}.0.layer_norm.weight", "h", layer=layer),
        *(replace(rule, layer=layer) for rule in separate(attention, "q", "k", "v")),
        TensorRule(f"{_OURS}.attention.out.weight", "h a", f"{attention}.o.weight", "h a", layer=layer),
        TensorRule(f"{_OURS}.mlp_norm.weight", "h", f"{theirs}.{mlp}.layer_norm.weight", "h", layer=layer),
        TensorRule(
            up, "f h", f"{dense}.wi.weight", "f h", when=lambda spec: not _is_gated(spec), layer=layer
        ),
        TensorRule(up, "2 f h", f"{dense}.wi_0.weight", "(2 f) h", _FIRST, _is_gated, layer),
        TensorRule(up, "2 f h", f"{dense}.wi_1.weight", "(2 f) h", _SECOND, _is_gated, layer),
        TensorRule(f"{_OURS}.mlp.down.weight", "h f", f"{dense}.wo.weight", "h f", layer=layer),
    )


def _cross(theirs: str) -> tuple[TensorRule, ...]:
    attention, both = f"{theirs}.EncDecAttention", f"{_OURS}.cross.key_value.weight"
    return (
        TensorRule(f"{_OURS}.cross_norm.weight", "h", f"{theirs}.layer_norm.weight", "h", layer=_decodes),
        TensorRule(
            f"{_OURS}.cross.query.weight", "q d h", f"{attention}.q.weight", "(q d) h", layer=_decodes
        ),
        TensorRule(both, "g 2 d h", f"{attention}.k.weight", "(g 2 d) h", _FIRST, layer=_decodes),
        TensorRule(both, "g 2 d h", f"{attention}.v.weight", "(g 2 d) h", _SECOND, layer=_decodes),
        TensorRule(f"{_OURS}.cross.out.weight", "h a", f"{attention}.o.weight", "h a", layer=_decodes),
    )


def _biases(stack: str) -> TensorRule:
    theirs = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    return TensorRule(f"{stack}.relative_bias.weight", "b q", theirs, "b q")


def _seen(model: ModelConfig, tensors: Mapping[str, TensorLike]) -> ModelConfig:
    """Return the model.

    Raises:
        ValueError: outputs are not scaled, but the head is tied, which megazero lacks.
    """
    if model.untie_embeddings_and_output_weights and _HEAD not in tensors:
        raise ValueError(
            f"they lack {_HEAD}: the head is tied to the embedding, but `{_SCALED}` is false, as in a T5 1.1 "
            "that transformers 5 makes anew; here a head that is not scaled has weights of its own: store a "
            f"copy of shared.weight as {_HEAD}, or make the model with `{_SCALED}` true"
        )
    return model


T5_GENERATION = Architecture(
    name="T5ForConditionalGeneration",
    model_type="t5",
    auto="AutoModelForSeq2SeqLM",
    prefix="",
    rules=(
        TensorRule("embedding.word.weight", "v h", "shared.weight", "v h"),
        _biases("encoder"),
        _biases("decoder"),
        *_layer("encoder.block.{i}.layer", 1, lambda layer: layer.cross is None),
        *_layer("decoder.block.{j}.layer", 2, _decodes),
        *_cross("decoder.block.{j}.layer.1"),
        TensorRule("encoder_norm.weight", "h", "encoder.final_layer_norm.weight", "h"),
        TensorRule("final_norm.weight", "h", "decoder.final_layer_norm.weight", "h"),
        TensorRule("head.weight", "v h", _HEAD, "v h", when=untied),
    ),
    copies=(
        (_HEAD, "shared.weight"),
        ("encoder.embed_tokens.weight", "shared.weight"),
        ("decoder.embed_tokens.weight", "shared.weight"),
    ),
    # Files of T5 1.0 also have a table of biases for cross-attention, which older releases never used.
    ignored=(r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",),
    settings=(
        FieldPair("num_layers", "t5_encoder_layers", 6, resolved="encoder_layers"),
        FieldPair("num_decoder_layers", "t5_decoder_layers", None, int),
        FieldPair("d_model", "hidden_size", 512),
        FieldPair("num_heads", "num_attention_heads", 8),
        FieldPair("d_kv", "kv_channels", 64, resolved="head_dim"),
        FieldPair("d_ff", "ffn_hidden_size", 2048, resolved="ffn_size"),
        FieldPair("n_positions", "max_position_embeddings", 512, resolved="positions"),
        FieldPair("relative_attention_num_buckets", "t5_relative_buckets", 32),
        FieldPair("relative_attention_max_distance", "t5_relative_distance", 128),
        FieldPair(
            "feed_forward_proj", "activation", "relu", words=(("relu", "relu"), ("gated-gelu", "geglu"))
        ),
        FieldPair("layer_norm_epsilon", "norm_epsilon", 1e-6),
        FieldPair("dropout_rate", "hidden_dropout", 0.1),
        FieldPair("dropout_rate", "attention_dropout", 0.1),
        FieldPair(_TIED, "untie_embeddings_and_output_weights", True, words=((True, False), (False, True))),
    ),
    fixed=(("is_encoder_decoder", True),),
    ours_fixed=(
        ("family", "t5"),
        ("position_embedding_type", "relative"),
        ("normalization", "RMSNorm"),
        ("add_bias_linear", False),
        ("add_qkv_bias", False),
        ("t5_style", "google"),
    ),
    limits=(
        PLAIN_EMBEDDING,
        UNGROUPED,
        Limit(
            lambda m: m.tells_distances,
            "`relative_attention_num_buckets` must be at least 4, and `relative_attention_max_distance` more "
            "than half of that",
        ),
    ),
    plain=lambda config: {**config, _TIED: config.get(_SCALED, config.get(_TIED, True))},
    complete=lambda config: {**config, _SCALED: config[_TIED], "decoder_start_token_id": 0},
    seen=_seen,
)
