"""A small model in a folder of Hugging Face, with a tokenizer that has a chat template."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.data.conversations.templates import CHATML
from tests.data.conversations.tokenizer import byte_level, write_folder


def llama_folder(
    folder: Path, *, template: str | None = CHATML, hidden: int = 32, positions: int = 256
) -> Path:
    """Write a Llama of two layers whose drawn tokens differ; `hidden` is its width."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = byte_level()
    write_folder(folder, tokenizer, template, eos="<|im_end|>")
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=positions,
        initializer_range=0.2,
        eos_token_id=tokenizer.token_to_id("<|im_end|>"),
        bos_token_id=tokenizer.token_to_id("<s>"),
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).float()
    model.generation_config.eos_token_id = [
        tokenizer.token_to_id(name) for name in ("<|im_end|>", "<|eot_id|>")
    ]
    model.save_pretrained(folder)
    return folder
