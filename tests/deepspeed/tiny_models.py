"""Tiny Hugging Face models with random weights, the same in every process."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

VOCABULARY = 66


def sizes(kind: str, heads: int, key_value: int) -> dict[str, Any]:
    """The keys of a configuration of two layers with heads of 8 features."""
    hidden = 8 * heads
    short = {"n_embd": hidden, "n_layer": 2, "n_head": heads, "n_positions": 32}
    common = {
        "hidden_size": hidden,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "max_position_embeddings": 32,
    }
    grouped = {**common, "num_key_value_heads": key_value}
    own: dict[str, dict[str, Any]] = {
        "gpt2": short,
        "gptj": {**short, "rotary_dim": 4},
        "gpt_bigcode": short,
        "gpt_neo": {
            "hidden_size": hidden,
            "num_layers": 2,
            "num_heads": heads,
            "attention_types": [[["global", "local"], 1]],
            "max_position_embeddings": 32,
        },
        "bloom": {"hidden_size": hidden, "n_layer": 2, "n_head": heads},
        "mpt": {"d_model": hidden, "n_layers": 2, "n_heads": heads, "max_seq_len": 32},
        "falcon": {"hidden_size": hidden, "num_hidden_layers": 2, "num_attention_heads": heads},
        "distilbert": {
            "dim": hidden,
            "n_layers": 2,
            "n_heads": heads,
            "hidden_dim": 24,
            "max_position_embeddings": 32,
        },
        "opt": {**common, "ffn_dim": 24, "word_embed_proj_dim": hidden},
        "mixtral": {**grouped, "num_local_experts": 4},
        "qwen2_moe": {
            **grouped,
            "num_experts": 4,
            "moe_intermediate_size": 12,
            "shared_expert_intermediate_size": 20,
            "num_experts_per_tok": 2,
        },
    }
    own["qwen3_moe"] = own["qwen2_moe"]
    own["t5"] = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": heads}
    own["mt5"] = own["t5"]
    plain = kind in ("bert", "roberta", "xlm-roberta", "camembert", "electra", "gpt_neox", "codegen")
    return own.get(kind, common if plain else grouped)


def tiny(kind: str, heads: int = 4, key_value: int = 2, seed: int = 0, **keys: Any) -> Any:
    """A model of a family, with biases and norms that are not their initial values."""
    import transformers

    config = type(transformers.AutoConfig.for_model(kind))
    given = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    given |= sizes(kind, heads, key_value) | keys
    if "head_dim" in config().to_dict():
        given["head_dim"] = 8
    auto = transformers.AutoModelForCausalLM
    if kind in ("t5", "mt5"):
        auto = transformers.AutoModelForSeq2SeqLM
    elif "bert" in kind or kind == "electra":
        auto = transformers.AutoModelForMaskedLM
    generator = torch.Generator().manual_seed(seed)
    model = auto.from_config(config(**given)).eval()
    with torch.no_grad():
        for param in model.parameters():
            noise = torch.randn(param.shape, generator=generator)
            param.copy_(0.3 * noise if param.ndim > 1 else param + 0.1 * noise)
    return model


def prompts(rows: int = 2, length: int = 7, seed: int = 3) -> Tensor:
    """Token ids [rows, length], without special ones."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 60, (rows, length), generator=generator)


def inputs(model: Any) -> dict[str, Tensor]:
    """A batch for a model of any family, by keyword."""
    tokens = prompts()
    batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    if model.config.is_encoder_decoder:
        batch["decoder_input_ids"] = tokens[:, :5]
    return batch
