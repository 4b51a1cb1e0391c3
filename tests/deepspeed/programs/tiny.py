"""A language model of a few thousand weights, and token sequences for it."""

from __future__ import annotations

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

WORDS = 64


class Tokens(Dataset):
    """Sequences of random tokens; the same for the same seed."""

    def __init__(self, count: int, length: int = 12, seed: int = 5):
        draw = torch.Generator().manual_seed(seed)
        self.rows = torch.randint(WORDS, (count, length), generator=draw)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def llama(seed: int = 3, tied: bool = False) -> LlamaForCausalLM:
    """A Llama of two small layers."""
    torch.manual_seed(seed)
    shape = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
        tie_word_embeddings=tied,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return LlamaForCausalLM(shape)
