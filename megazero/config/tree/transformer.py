"""The shape of a transformer with dense layers, in the section `model`."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from megazero.config.condition import config, here, when
from megazero.config.tree.option import Probability, Section, of_model, of_training
from megazero.config.tree.roles import Role

Activation = Literal["gelu", "gelu_exact", "swiglu", "geglu", "quick_geglu", "squared_relu", "relu", "xielu"]
_GATED = here.activation.among("swiglu", "geglu", "quick_geglu")
_LOGITS = (here.family == "gpt").because("the heads of other families have no such factor")
Positions = Literal["learned_absolute", "rope", "yarn", "alibi", "relative", "none"]
"""The kinds of position embedding."""


class TransformerConfig(Section):
    """The shape of a transformer with dense layers"""

    family: Literal["gpt", "bert", "t5"] = of_model("gpt", flag="--model-family")
    """kind of model; pretrain_bert.py sets bert"""
    num_layers: PositiveInt = of_model(..., roles=Role.MEGATRON)
    """number of transformer layers"""
    hidden_size: PositiveInt = of_model(..., roles=Role.MEGATRON)
    """width of the residual stream"""
    num_attention_heads: PositiveInt = of_model(..., roles=Role.NOT_OF_MAMBA | Role.MEGATRON)
    """number of query heads"""
    seq_length: PositiveInt = of_training(
        ..., roles=Role.MEGATRON, unit="tokens", aliases=("--encoder-seq-length",)
    )
    """training sequence length"""
    max_position_embeddings: PositiveInt | None = of_model(
        None, roles=Role.ROTARY | Role.MEGATRON, resolved="positions"
    )
    """rows of the position table and longest rotary range; default: the sequence length"""
    ffn_hidden_size: PositiveInt | None = of_model(None, roles=Role.MEGATRON, resolved="ffn_size")
    """inner width of the MLP; default: 4 x hidden, or 8/3 x hidden rounded to 64 with SwiGLU"""
    num_query_groups: PositiveInt | None = of_model(
        None, roles=Role.NOT_OF_MAMBA, aliases=("--num-key-value-heads",), resolved="kv_heads"
    )
    """key/value heads of grouped-query attention; default: one per query head. Here --group-query-attention
    may be left out, without which Megatron-LM ignores --num-query-groups"""
    kv_channels: PositiveInt | None = of_model(
        None, roles=Role.NOT_OF_MAMBA | Role.MEGATRON, resolved="head_dim"
    )
    """width of one head; default: hidden / heads"""
    position_embedding_type: Positions = of_model(
        "learned_absolute",
        roles=Role.ROTARY,
        switches={"--use-rotary-position-embeddings": "rope", "--no-position-embedding": "none"},
        yielding=("--no-position-embedding",),
        needs=(
            when("alibi", here.family == "gpt").because("the biases are of earlier tokens"),
            when("relative", here.family == "t5"),
        ),
    )
    """how tokens learn their position; alibi: by biases of the attention scores, linear in the distance;
    relative: by learned biases of kinds of distance (T5)"""
    embed_layernorm: bool = of_model(False, roles=Role.MEGATRON)
    """normalize the words' embeddings, before positions are added (BLOOM)"""
    normalization: Literal["LayerNorm", "RMSNorm"] = of_model("LayerNorm")
    """kind of normalization"""
    norm_bias: bool = of_model(
        True,
        roles=Role.VARIANT,
        flag="--disable-norm-bias",
        needs=(here.normalization == "LayerNorm").because("RMSNorm has none"),
    )
    """leave the biases out of layer norms (Cohere, MPT)"""
    norm_epsilon: PositiveFloat = of_model(1e-5, aliases=("--layernorm-epsilon",))
    """added to the variance"""
    apply_layernorm_1p: bool = of_model(False, roles=Role.VARIANT | Role.MEGATRON)
    """store the weights of norms less 1, so that they begin at 0 and are rounded less (Gemma)"""
    norm_position: Literal["input", "output", "both"] = of_model(
        "input",
        roles=Role.VARIANT,
        needs=when("output", here.apply_residual_connection_post_layernorm.is_off).because(
            "no input is normalized there"
        ),
    )
    """where attention and MLP are normalized: their inputs, their outputs before they are added to the
    residual (OLMo-2), or both (the sandwich of Gemma 2, Gemma 3 and GLM-4)"""
    activation: Activation = of_model(
        "gelu",
        roles=Role.NOT_OF_MAMBA,
        switches={
            "--swiglu": "swiglu",
            "--gated-linear-unit": "geglu",
            "--quick-geglu": "quick_geglu",
            "--squared-relu": "squared_relu",
            "--openai-gelu": "gelu",
            # Megatron's fused bias+GELU is the tanh form; unfused it takes torch's exact GELU.
            "--no-bias-gelu-fusion": "gelu_exact",
        },
        yielding=("--no-bias-gelu-fusion",),
        implies={"--openai-gelu": ("bert_head_activation", "gelu")},
        needs=when("xielu", here.num_experts == ()).because("experts have no slopes of their own"),
    )
    """MLP nonlinearity; gelu is the tanh form of GPT-2, gelu_exact the erf form, and the default where linear
    layers have no biases; in swiglu, geglu (tanh form, T5 1.1) and quick_geglu (x sigmoid(1.702 x)) half of
    the inner values gate the other half; xielu has two learned slopes"""
    glu_linear_offset: float = of_model(0.0, roles=Role.VARIANT, needs=_GATED)
    """added to the values that are gated; gpt-oss has 1"""
    activation_func_clamp_value: PositiveFloat | None = of_model(None, roles=Role.VARIANT, needs=_GATED)
    """bounds the gates from above, and the gated values from both sides; gpt-oss has 7"""
    add_bias_linear: bool = of_model(
        True, roles=Role.NOT_OF_MAMBA | Role.MEGATRON, flag="--disable-bias-linear"
    )
    """leave the biases out of linear layers"""
    add_qkv_bias: bool = of_model(False, roles=Role.NOT_OF_MAMBA | Role.MEGATRON, resolved="qkv_bias")
    """give queries, keys and values biases, also where other linear layers have none"""
    untie_embeddings_and_output_weights: bool = of_model(False, roles=Role.HEAD | Role.MEGATRON)
    """give the output head a weight of its own"""
    hidden_dropout: Probability = of_training(0.1, roles=Role.MEGATRON)
    """dropout on the residual branches and the embedding"""
    attention_dropout: Probability = of_training(0.1, roles=Role.MEGATRON)
    """dropout on the attention probabilities"""
    init_method_std: PositiveFloat = of_training(0.02, roles=Role.MEGATRON)
    """standard deviation of the initial weights"""
    vocab_size: PositiveInt | None = of_training(None)
    """vocabulary entries before padding; default: the tokenizer's"""
    make_vocab_size_divisible_by: PositiveInt = of_training(128, roles=Role.MEGATRON)
    """pad the vocabulary to a multiple of this times the tensor-parallel size"""
    pad_vocab_size_to: PositiveInt | None = of_training(None, aliases=("--padded-vocab-size",))
    """pad the vocabulary to so many rows; default: as --make-vocab-size-divisible-by says"""
    extra_vocab_size: NonNegativeInt = of_training(0)
    """entries of the vocabulary beyond those of the tokenizer or of --vocab-size"""
    fp32_residual_connection: bool = of_model(False, roles=Role.MEGATRON)
    """keep the residual stream in fp32"""
    apply_residual_connection_post_layernorm: bool = of_model(False, roles=Role.MEGATRON)
    """take the residual after the normalization instead of before"""
    use_parallel_residual: bool = of_model(
        False, roles=Role.VARIANT, needs=here.apply_residual_connection_post_layernorm.is_off
    )
    """let the MLP read the input of attention instead of its result, and add both (GPT-NeoX, Falcon)"""
    share_parallel_norm: bool = of_model(
        False,
        roles=Role.VARIANT,
        needs=(
            here.use_parallel_residual,
            (here.norm_position == "input").because("there are norms of outputs otherwise"),
        ),
    )
    """let attention and MLP read one norm where both read the same input (GPT-J, Cohere)"""
    embedding_multiplier: PositiveFloat = of_model(1.0, roles=Role.VARIANT)
    """factor of the words' embeddings, where they enter the layers; Gemma has sqrt(hidden size)"""
    residual_multiplier: PositiveFloat = of_model(1.0, roles=Role.VARIANT)
    """factor of what attention and MLP add to the residual (Granite)"""
    logits_multiplier: PositiveFloat = of_model(1.0, roles=Role.VARIANT, needs=_LOGITS)
    """factor of the logits (Granite, Cohere)"""
    final_logit_softcapping: PositiveFloat | None = of_model(
        None,
        roles=Role.VARIANT,
        needs=(
            _LOGITS,
            config.recompute.logits.is_off.because("the loss by blocks of the vocabulary has no such bound"),
        ),
    )
    """bound c of the logits, which become c tanh(logit / c) (Gemma 2)"""

    @model_validator(mode="before")
    @classmethod
    def _gelu_without_bias(cls, data: object) -> object:
        """Without biases, default to exact GELU: Megatron fuses the tanh form with a bias, and no other."""
        if isinstance(data, dict) and data.get("add_bias_linear") is False:
            return {"activation": "gelu_exact", **data}
        return data

    @property
    def kv_heads(self) -> int:
        """Number of key/value heads."""
        return self.num_query_groups or self.num_attention_heads

    @property
    def qkv_bias(self) -> bool:
        """Whether queries, keys and values have biases."""
        return self.add_bias_linear or self.add_qkv_bias

    @property
    def gated(self) -> bool:
        """Whether half of an MLP's inner values gate the other half."""
        return self.activation in ("swiglu", "geglu", "quick_geglu")

    @property
    def ffn_size(self) -> int:
        """Inner width of the MLP (of each of the two halves, if one gates the other)."""
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        if self.gated:
            return max(64, int(4 * self.hidden_size * 2 / 3) // 64 * 64)
        return 4 * self.hidden_size

    @property
    def positions(self) -> int:
        """The longest sequence that the model takes."""
        return self.max_position_embeddings or self.seq_length
