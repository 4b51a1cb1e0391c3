"""transformers' T5 of a shape of ours, and our weights under its names."""

from __future__ import annotations

from torch import Tensor, nn

from megazero.config.tree.model import ModelConfig


def t5_shape(**changes) -> ModelConfig:
    """T5 1.1 with two layers in either stack."""
    shape = {
        "family": "t5",
        "t5_encoder_layers": 2,
        "t5_decoder_layers": 3,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "kv_channels": 6,
        "ffn_hidden_size": 40,
        "seq_length": 24,
        "t5_decoder_seq_length": 16,
        "t5_relative_buckets": 8,
        "t5_relative_distance": 12,
        "vocab_size": 61,
        "make_vocab_size_divisible_by": 4,
        "position_embedding_type": "relative",
        "normalization": "RMSNorm",
        "norm_epsilon": 1e-6,
        "activation": "geglu",
        "add_bias_linear": False,
        "untie_embeddings_and_output_weights": True,
        "t5_style": "google",
        "init_method_std": 0.15,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    return ModelConfig(**{**shape, **changes})


def t5_model(model: ModelConfig) -> nn.Module:
    """T5ForConditionalGeneration of this shape."""
    from transformers import T5Config, T5ForConditionalGeneration

    tied = not model.untie_embeddings_and_output_weights
    config = T5Config(
        vocab_size=model.vocab_size,
        d_model=model.hidden_size,
        d_kv=model.head_dim,
        d_ff=model.ffn_size,
        num_layers=model.encoder_layers,
        num_decoder_layers=model.num_layers - model.encoder_layers,
        num_heads=model.num_attention_heads,
        relative_attention_num_buckets=model.t5_relative_buckets,
        relative_attention_max_distance=model.t5_relative_distance,
        dropout_rate=0.0,
        layer_norm_epsilon=model.norm_epsilon,
        feed_forward_proj={"geglu": "gated-gelu", "relu": "relu"}[model.activation],
        tie_word_embeddings=tied,
        decoder_start_token_id=0,
        pad_token_id=0,
        eos_token_id=1,
    )
    theirs = T5ForConditionalGeneration(config).eval()
    assert theirs.config.scale_decoder_outputs == tied
    if not tied:  # newer releases tie the two when a model is made, and part them where a file has both
        theirs.lm_head.weight = nn.Parameter(theirs.lm_head.weight.detach().clone())
    return theirs


def to_theirs(ours: dict[str, Tensor], model: ModelConfig) -> dict[str, Tensor]:
    """Our weights under transformers' names; a row of ours may be several of theirs."""
    theirs = {
        "shared.weight": ours["embedding.word.weight"],
        "decoder.final_layer_norm.weight": ours["final_norm.weight"],
    }
    theirs["encoder.embed_tokens.weight"] = theirs["decoder.embed_tokens.weight"] = theirs["shared.weight"]
    theirs["encoder.final_layer_norm.weight"] = ours["encoder_norm.weight"]
    theirs["lm_head.weight"] = ours.get("head.weight", theirs["shared.weight"])
    for number in range(model.num_layers):
        stack, place = ("encoder", number)
        if number >= model.encoder_layers:
            stack, place = "decoder", number - model.encoder_layers
        own, layer = f"layers.{number}", f"{stack}.block.{place}.layer"
        mlp = 2 if stack == "decoder" else 1
        query, key, value = ours[f"{own}.attention.qkv.weight"].split((1, 1, 1), 1)
        parts = {"q": query, "k": key, "v": value}
        for name, weight in parts.items():
            theirs[f"{layer}.0.SelfAttention.{name}.weight"] = weight.reshape(-1, model.hidden_size)
        theirs[f"{layer}.0.SelfAttention.o.weight"] = ours[f"{own}.attention.out.weight"]
        theirs[f"{layer}.0.layer_norm.weight"] = ours[f"{own}.input_norm.weight"]
        if place == 0:
            bias = ours[f"{stack}.relative_bias.weight"]
            theirs[f"{layer}.0.SelfAttention.relative_attention_bias.weight"] = bias
        if stack == "decoder":
            cross = f"{layer}.1.EncDecAttention"
            theirs[f"{cross}.q.weight"] = ours[f"{own}.cross.query.weight"].flatten(0, 1)
            both = ours[f"{own}.cross.key_value.weight"]
            theirs[f"{cross}.k.weight"], theirs[f"{cross}.v.weight"] = (
                side.reshape(-1, model.hidden_size) for side in both.unbind(1)
            )
            theirs[f"{cross}.o.weight"] = ours[f"{own}.cross.out.weight"]
            theirs[f"{layer}.1.layer_norm.weight"] = ours[f"{own}.cross_norm.weight"]
        theirs[f"{layer}.{mlp}.layer_norm.weight"] = ours[f"{own}.mlp_norm.weight"]
        up, dense = ours[f"{own}.mlp.up.weight"], f"{layer}.{mlp}.DenseReluDense"
        if model.activation == "geglu":
            theirs[f"{dense}.wi_0.weight"], theirs[f"{dense}.wi_1.weight"] = up
        else:
            theirs[f"{dense}.wi.weight"] = up
        theirs[f"{dense}.wo.weight"] = ours[f"{own}.mlp.down.weight"]
    return theirs
