"""The common tables of transformers' two kinds of BERT, which differ only in the place of their norms.

Each kind has a class per set of heads. Every class has token types; a model of megazero's may lack them, and
is written with a table of zeros, which is read as none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from megazero.checkpoint.naming import TensorRule, untied
from megazero.config.tree.model import ModelConfig
from megazero.formats.hf.architecture import (
    DENSE_LIMITS,
    Architecture,
    FieldPair,
    Limit,
    TensorLike,
    pair,
    separate,
)
from megazero.formats.hf.class_names import COUNT, with_count, with_default_names
from megazero.formats.hf.windows import PLAIN_ATTENTION
from megazero.spec.model import ModelSpec

WORDS = "bert.embeddings.word_embeddings.weight"
LAYER = "bert.encoder.layer.{i}"
_OURS = "layers.{i}"
_TYPES = "bert.embeddings.token_type_embeddings.weight"
_BIAS = "cls.predictions.bias"
_HEAD = "cls.predictions.decoder"
_BINARY = "cls.seq_relationship"
_GELUS = (("gelu", "gelu_exact"), ("gelu_new", "gelu"), ("gelu_pytorch_tanh", "gelu"))
_OF_PRETRAINING = ("bert_binary_head", "bert_head_activation")
_LEAST = 2


def _with_types(spec: ModelSpec) -> bool:
    return spec.embedding.token_types > 0


EMBEDDING = (
    TensorRule("embedding.word.weight", "v h", WORDS, "v h"),
    TensorRule("embedding.position.weight", "p h", "bert.embeddings.position_embeddings.weight", "p h"),
    TensorRule("embedding.token_type.weight", "2 h", _TYPES, "2 h", when=_with_types),
)
LINEAR = (
    *separate(f"{LAYER}.attention.self", "query", "key", "value"),
    *pair(f"{_OURS}.attention.out", f"{LAYER}.attention.output.dense", "h a"),
    *pair(f"{_OURS}.mlp.up", f"{LAYER}.intermediate.dense", "f h"),
    *pair(f"{_OURS}.mlp.down", f"{LAYER}.output.dense", "h f"),
)
POOLER = pair("pooler", "bert.pooler.dense", "h e")
MASKED_HEAD = (
    *pair("head.dense", "cls.predictions.transform.dense", "h e"),
    *pair("head.norm", "cls.predictions.transform.LayerNorm"),
    TensorRule("head.bias", "v", _BIAS, "v"),
    TensorRule("head.weight", "v h", f"{_HEAD}.weight", "v h", when=untied),
    # transformers 5 adds this second bias to the logits; it is tied to the first only if the weight is tied.
    TensorRule("head.bias", "v", f"{_HEAD}.bias", "v", when=untied),
)
BINARY_HEAD = (*POOLER, *pair("binary_head", _BINARY, "2 h"))
CLASSIFIER = pair("classifier", "classifier", "n h")
BLANK = (
    TensorRule("embedding.token_type.weight", "2 h", _TYPES, "2 h", when=lambda spec: not _with_types(spec)),
)
COPIES = ((f"{_HEAD}.weight", WORDS), (f"{_HEAD}.bias", _BIAS))
IGNORED = (r"bert\.embeddings\.(position_ids|token_type_ids)",)
RENAMED = ((r"(.*LayerNorm)\.gamma", r"\1.weight"), (r"(.*LayerNorm)\.beta", r"\1.bias"))

SETTINGS = (
    FieldPair("num_hidden_layers", "num_layers", 12),
    FieldPair("hidden_size", "hidden_size", 768),
    FieldPair("num_attention_heads", "num_attention_heads", 12),
    FieldPair("intermediate_size", "ffn_hidden_size", 3072, resolved="ffn_size"),
    FieldPair("max_position_embeddings", "max_position_embeddings", 512, resolved="positions"),
    FieldPair("hidden_act", "activation", "gelu", words=_GELUS),
    FieldPair("hidden_act", "bert_head_activation", "gelu", words=_GELUS),
    FieldPair("layer_norm_eps", "norm_epsilon", 1e-12),
    FieldPair("hidden_dropout_prob", "hidden_dropout", 0.1),
    FieldPair("attention_probs_dropout_prob", "attention_dropout", 0.1),
    FieldPair("initializer_range", "init_method_std", 0.02),
    FieldPair(
        "tie_word_embeddings",
        "untie_embeddings_and_output_weights",
        True,
        words=((True, False), (False, True)),
    ),
)
FIXED = (
    ("type_vocab_size", 2),
    ("position_embedding_type", "absolute"),
    ("is_decoder", False),
)
OURS_FIXED = (
    ("family", "bert"),
    ("position_embedding_type", "learned_absolute"),
    ("normalization", "LayerNorm"),
    ("add_bias_linear", True),
)
TRUNK_LIMITS = (*DENSE_LIMITS, *PLAIN_ATTENTION)
LIMITS = (
    *TRUNK_LIMITS,
    Limit(
        lambda m: m.activation == m.bert_head_activation,
        "`bert_head_activation` must be `activation`, as transformers has one GELU for the MLPs and the "
        "masked-LM head, but one is the tanh form and the other the erf form, as Megatron has it by default; "
        "train with `pretrain_bert.py --no-bias-gelu-fusion` to have the erf form in both, or accept "
        "slightly other outputs: `--approximate-gelu` writes the head with the MLPs' form",
    ),
)


def heads_seen(model: ModelConfig, tensors: Mapping[str, TensorLike]) -> ModelConfig:
    """The model with a binary head if the tensors have one, and with token types unless they are zeros.

    Google's own folders name the class without the binary head, although their files have it.
    """
    binary = model.bert_binary_head or f"{_BINARY}.weight" in tensors
    types = not binary and not _blank_types(model, tensors)
    return model.model_copy(update={"bert_binary_head": binary, "bert_token_types": types})


def types_seen(model: ModelConfig, tensors: Mapping[str, TensorLike]) -> ModelConfig:
    """The classifier with token types (a setting of models with the binary head) unless they are zeros."""
    return model.model_copy(update={"bert_binary_head": not _blank_types(model, tensors)})


def _blank_types(model: ModelConfig, tensors: Mapping[str, TensorLike]) -> bool:
    types = tensors.get(_TYPES)
    return types is not None and types.shape == (2, model.hidden_size) and not types.rows(slice(0, 2)).any()


def with_one_gelu(model: ModelConfig) -> ModelConfig:
    """The model with the MLPs' form of GELU in its masked-LM head, if it has such a head."""
    headless = model.family != dict(OURS_FIXED)["family"] or model.num_classes is not None
    if headless or model.activation not in dict(_GELUS).values():
        return model
    return model.model_copy(update={"bert_head_activation": model.activation})


def pretraining(name: str, model_type: str, body: tuple[TensorRule, ...], *, post_norm: bool) -> Architecture:
    """The class called `name` with both heads of pretraining; `body` are embedding and layers."""
    return Architecture(
        name=name,
        model_type=model_type,
        auto="AutoModelForPreTraining",
        prefix="bert.",
        rules=(*body, *BINARY_HEAD, *MASKED_HEAD),
        copies=COPIES,
        ignored=IGNORED,
        renamed=RENAMED,
        settings=SETTINGS,
        fixed=FIXED,
        ours_fixed=(
            *OURS_FIXED,
            ("apply_residual_connection_post_layernorm", post_norm),
            ("bert_binary_head", True),
        ),
        limits=LIMITS,
        seen=heads_seen,
    )


def masked_lm(base: Architecture, name: str, body: tuple[TensorRule, ...]) -> Architecture:
    """The class called `name`, which is `base` without the binary head."""
    return replace(
        base,
        name=name,
        auto="AutoModelForMaskedLM",
        rules=(*body, *MASKED_HEAD),
        blank=BLANK,
        ours_fixed=(*base.ours_fixed[:-1], ("bert_binary_head", False)),
    )


def sequence_classification(base: Architecture, name: str, body: tuple[TensorRule, ...]) -> Architecture:
    """The class called `name`, which classifies sequences; `body` are the embedding and layers of `base`."""
    trunk = _classifier(base, name, body)
    return replace(
        trunk,
        auto="AutoModelForSequenceClassification",
        settings=(*trunk.settings, FieldPair(COUNT, "num_classes", _LEAST)),
        fixed=(*trunk.fixed, ("problem_type", "single_label_classification")),
        limits=(
            *trunk.limits,
            Limit(
                lambda m: m.num_classes is None or m.num_classes >= _LEAST,
                "there must be two classes or more, as transformers takes one for regression",
            ),
        ),
        plain=with_count,
        complete=with_default_names,
    )


def multiple_choice(base: Architecture, name: str, body: tuple[TensorRule, ...]) -> Architecture:
    """The class called `name`, which gives each choice a score; `body` as above."""
    trunk = _classifier(base, name, body)
    ours_fixed = (*trunk.ours_fixed, ("num_classes", 1))
    return replace(trunk, auto="AutoModelForMultipleChoice", ours_fixed=ours_fixed)


def _classifier(base: Architecture, name: str, body: tuple[TensorRule, ...]) -> Architecture:
    """`base` with a classifier instead of its heads, and without the setting of their GELU."""
    return replace(
        base,
        name=name,
        rules=(*body, *POOLER, *CLASSIFIER),
        copies=(),
        blank=BLANK,
        settings=tuple(setting for setting in base.settings if setting.ours not in _OF_PRETRAINING),
        ours_fixed=tuple((field, value) for field, value in base.ours_fixed if field not in _OF_PRETRAINING),
        limits=TRUNK_LIMITS,
        classifies=True,
        seen=types_seen,
    )
