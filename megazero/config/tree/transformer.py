"""The shape of a transformer: a part of the section of the tree about the model."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from megazero.config.tree.option import Probability, Section, option

Activation = Literal["gelu", "gelu_exact", "swiglu", "geglu", "quick_geglu", "squared_relu", "relu", "xielu"]
_LOGITS = "family=gpt: the heads of other families have no such factor"
Positions = Literal["learned_absolute", "rope", "yarn", "alibi", "relative", "none"]
"""The ways in which tokens learn their position."""


class TransformerConfig(Section):
    """The shape of a transformer with dense layers"""

    family: Literal["gpt", "bert", "t5"] = option(
        "gpt", "kind of model; pretrain_bert.py sets bert", flag="--model-family"
    )
    num_layers: PositiveInt = option(..., "number of transformer layers")
    hidden_size: PositiveInt = option(..., "width of the residual stream")
    num_attention_heads: PositiveInt = option(..., "number of query heads")
    seq_length: PositiveInt = option(
        ..., "training sequence length", unit="tokens", aliases=("--encoder-seq-length",)
    )
    max_position_embeddings: PositiveInt | None = option(
        None, "rows of the position table and longest rotary range; default: the sequence length"
    )
    ffn_hidden_size: PositiveInt | None = option(
        None, "inner width of the MLP; default: 4 x hidden, or 8/3 x hidden rounded to 64 with SwiGLU"
    )
    num_query_groups: PositiveInt | None = option(
        None,
        "key/value heads of grouped-query attention; default: one per query head. Here "
        "--group-query-attention may be left out, without which Megatron-LM ignores --num-query-groups",
        aliases=("--num-key-value-heads",),
    )
    kv_channels: PositiveInt | None = option(None, "width of one head; default: hidden / heads")
    position_embedding_type: Positions = option(
        "learned_absolute",
        "how tokens learn their position; alibi: by biases of the attention scores, linear in the distance; "
        "relative: by learned biases of kinds of distance (T5)",
        switches={"--use-rotary-position-embeddings": "rope", "--no-position-embedding": "none"},
        yielding=("--no-position-embedding",),
        needs=("alibi => family=gpt: the biases are of earlier tokens", "relative => family=t5"),
    )
    embed_layernorm: bool = option(
        False, "normalize the words' embeddings, before positions are added (BLOOM)"
    )
    normalization: Literal["LayerNorm", "RMSNorm"] = option("LayerNorm", "kind of normalization")
    norm_bias: bool = option(
        True,
        "leave the biases out of layer norms (Cohere, MPT)",
        flag="--disable-norm-bias",
        needs="normalization=LayerNorm: RMSNorm has none",
    )
    norm_epsilon: PositiveFloat = option(1e-5, "added to the variance", aliases=("--layernorm-epsilon",))
    apply_layernorm_1p: bool = option(
        False, "store the weights of norms less 1, so that they begin at 0 and are rounded less (Gemma)"
    )
    norm_position: Literal["input", "output", "both"] = option(
        "input",
        "where attention and MLP are normalized: their inputs, their outputs before they are added to the "
        "residual (OLMo-2), or both (the sandwich of Gemma 2, Gemma 3 and GLM-4)",
        needs="output => apply_residual_connection_post_layernorm=False: no input is normalized there",
    )
    activation: Activation = option(
        "gelu",
        "MLP nonlinearity; gelu is the tanh form of GPT-2, gelu_exact the erf form, and the default where "
        "linear layers have no biases; in swiglu, geglu (tanh form, T5 1.1) and quick_geglu "
        "(x sigmoid(1.702 x)) half of the inner values gate the other half; xielu has two learned slopes",
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
        needs="xielu => num_experts=(): experts have no slopes of their own",
    )
    glu_linear_offset: float = option(
        0.0,
        "added to the values that are gated; gpt-oss has 1",
        needs="activation=swiglu,geglu,quick_geglu",
    )
    activation_func_clamp_value: PositiveFloat | None = option(
        None,
        "bounds the gates from above, and the gated values from both sides; gpt-oss has 7",
        needs="activation=swiglu,geglu,quick_geglu",
    )
    add_bias_linear: bool = option(
        True, "leave the biases out of linear layers", flag="--disable-bias-linear"
    )
    add_qkv_bias: bool = option(
        False, "give queries, keys and values biases, also where other linear layers have none"
    )
    untie_embeddings_and_output_weights: bool = option(False, "give the output head a weight of its own")
    hidden_dropout: Probability = option(0.1, "dropout on the residual branches and the embedding")
    attention_dropout: Probability = option(0.1, "dropout on the attention probabilities")
    init_method_std: PositiveFloat = option(0.02, "standard deviation of the initial weights")
    vocab_size: PositiveInt | None = option(
        None, "vocabulary entries before padding; default: the tokenizer's"
    )
    make_vocab_size_divisible_by: PositiveInt = option(
        128, "pad the vocabulary to a multiple of this times the tensor-parallel size"
    )
    pad_vocab_size_to: PositiveInt | None = option(
        None,
        "pad the vocabulary to so many rows; default: as --make-vocab-size-divisible-by says",
        aliases=("--padded-vocab-size",),
    )
    extra_vocab_size: NonNegativeInt = option(
        0, "entries of the vocabulary beyond those of the tokenizer or of --vocab-size"
    )
    fp32_residual_connection: bool = option(False, "keep the residual stream in fp32")
    apply_residual_connection_post_layernorm: bool = option(
        False, "take the residual after the normalization instead of before"
    )
    use_parallel_residual: bool = option(
        False,
        "let the MLP read the input of attention instead of its result, and add both (GPT-NeoX, Falcon)",
        needs="apply_residual_connection_post_layernorm=False",
    )
    share_parallel_norm: bool = option(
        False,
        "let attention and MLP read one norm where both read the same input (GPT-J, Cohere)",
        needs=("use_parallel_residual", "norm_position=input: there are norms of outputs otherwise"),
    )
    embedding_multiplier: PositiveFloat = option(
        1.0, "factor of the words' embeddings, where they enter the layers; Gemma has sqrt(hidden size)"
    )
    residual_multiplier: PositiveFloat = option(
        1.0, "factor of what attention and MLP add to the residual (Granite)"
    )
    logits_multiplier: PositiveFloat = option(1.0, "factor of the logits (Granite, Cohere)", needs=_LOGITS)
    final_logit_softcapping: PositiveFloat | None = option(
        None,
        "bound c of the logits, which become c tanh(logit / c) (Gemma 2)",
        needs=(_LOGITS, "recompute.logits=False: the loss by blocks of the vocabulary has no such bound"),
    )

    @model_validator(mode="before")
    @classmethod
    def _gelu_without_bias(cls, data: Any) -> Any:
        """Megatron's fused bias and GELU is the tanh form; without a bias it takes torch's exact GELU."""
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
        """Longest sequence that the model can be given."""
        return self.max_position_embeddings or self.seq_length
