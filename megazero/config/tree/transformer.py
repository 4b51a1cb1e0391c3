"""The shape of a transformer: a part of the section of the tree about the model."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from megazero.config.tree.option import Probability, Section, option


class TransformerConfig(Section):
    """The shape of a transformer with dense layers"""

    family: Literal["gpt", "bert"] = option(
        "gpt", "kind of model; pretrain_bert.py sets bert", flag="--model-family"
    )
    num_layers: PositiveInt = option(..., "number of transformer layers")
    hidden_size: PositiveInt = option(..., "width of the residual stream")
    num_attention_heads: PositiveInt = option(..., "number of query heads")
    seq_length: PositiveInt = option(..., "training sequence length", unit="tokens")
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
    position_embedding_type: Literal["learned_absolute", "rope", "yarn", "alibi", "none"] = option(
        "learned_absolute",
        "how tokens learn their position; alibi: by biases of the attention scores, linear in the distance",
        switches={"--use-rotary-position-embeddings": "rope", "--no-position-embedding": "none"},
        yielding=("--no-position-embedding",),
        needs="alibi => family=gpt: the biases are of earlier tokens",
    )
    embed_layernorm: bool = option(
        False, "normalize the words' embeddings, before positions are added (BLOOM)"
    )
    normalization: Literal["LayerNorm", "RMSNorm"] = option("LayerNorm", "kind of normalization")
    norm_epsilon: PositiveFloat = option(1e-5, "added to the variance", aliases=("--layernorm-epsilon",))
    activation: Literal["gelu", "gelu_exact", "swiglu", "squared_relu"] = option(
        "gelu",
        "MLP nonlinearity; gelu is the tanh form of GPT-2, gelu_exact the erf form, and the default where "
        "linear layers have no biases",
        switches={
            "--swiglu": "swiglu",
            "--squared-relu": "squared_relu",
            "--openai-gelu": "gelu",
            # Megatron's fused bias+GELU is the tanh form; unfused it takes torch's exact GELU.
            "--no-bias-gelu-fusion": "gelu_exact",
        },
        yielding=("--no-bias-gelu-fusion",),
        implies={"--openai-gelu": ("bert_head_activation", "gelu")},
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

    @model_validator(mode="before")
    @classmethod
    def _gelu_without_bias(cls, data: Any) -> Any:
        """Megatron's fused bias and GELU is the tanh form; without a bias it takes torch's exact GELU."""
        if isinstance(data, dict) and data.get("add_bias_linear") is False:
            return {"activation": "gelu_exact", **data}
        return data

    @property
    def head_dim(self) -> int:
        """Channels of one attention head."""
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def kv_heads(self) -> int:
        """Number of key/value heads."""
        return self.num_query_groups or self.num_attention_heads

    @property
    def qkv_bias(self) -> bool:
        """Whether queries, keys and values have biases."""
        return self.add_bias_linear or self.add_qkv_bias

    @property
    def ffn_size(self) -> int:
        """Inner width of the MLP (of each of the two halves with SwiGLU)."""
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        if self.activation == "swiglu":
            return max(64, int(4 * self.hidden_size * 2 / 3) // 64 * 64)
        return 4 * self.hidden_size

    @property
    def positions(self) -> int:
        """Longest sequence that the model can be given."""
        return self.max_position_embeddings or self.seq_length
