"""Masked words on texts longer than a BERT's positions: a longer table, and block-sparse attention."""

import deepspeed
import torch
from deepspeed.ops.sparse_attention import (
    BertSparseSelfAttention,
    BigBirdSparsityConfig,
    SparseAttentionUtils,
)
from torch import nn

WORDS, SHORT, LONG, MASK, IGNORED = 40, 32, 90, 3, -100
SECTION = {"mode": "bigbird", "block": 8, "num_random_blocks": 1, "num_sliding_window_blocks": 3}


class Sizes:
    """As BertSparseSelfAttention asks for them."""

    hidden_size, num_attention_heads = 32, 2


class Layer(nn.Module):
    """Attention and an MLP."""

    def __init__(self, sparsity):
        super().__init__()
        width = Sizes.hidden_size
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attention, self.out = BertSparseSelfAttention(Sizes, sparsity), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x, mask):
        x = x + self.out(self.attention(self.norms[0](x), mask))
        return x + self.mlp(self.norms[1](x))


class Embeddings(nn.Module):
    """Words and places, by the names that SparseAttentionUtils looks for."""

    def __init__(self, positions):
        super().__init__()
        self.words = nn.Embedding(WORDS, Sizes.hidden_size)
        self.position_embeddings = nn.Embedding(positions, Sizes.hidden_size)


class Bert(nn.Module):
    """Two layers; `bert` has the embeddings, and `config` the number of positions."""

    def __init__(self, sparsity):
        super().__init__()
        self.config = Sizes()
        self.bert = nn.Module()
        self.bert.embeddings = Embeddings(SHORT)
        self.layers, self.head = nn.ModuleList(Layer(sparsity) for _ in range(2)), nn.Linear(32, WORDS)

    def forward(self, ids, labels):
        kept = torch.ones_like(ids)
        padded = SparseAttentionUtils.pad_to_block_size(8, ids, kept, None, None, None, 0, None)
        added, ids, kept = padded[:3]
        embeddings = self.bert.embeddings
        x = embeddings.words(ids)
        x = x + embeddings.position_embeddings(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = layer(x, (1 - kept) * -10000.0)
        logits = self.head(SparseAttentionUtils.unpad_sequence_output(added, x))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


if __name__ == "__main__":
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 5e-3}},
        "zero_optimization": {"stage": 3},
        "sparse_attention": SECTION,
    }
    torch.manual_seed(0)
    model = Bert(BigBirdSparsityConfig(2, **{key: v for key, v in SECTION.items() if key != "mode"}))
    SparseAttentionUtils.extend_position_embedding(model, max_position=96)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    losses = []
    for step in range(16):
        ids = (torch.arange(LONG) % 2 + torch.arange(4).unsqueeze(1) * 2 + 8 * (step % 4)) % WORDS
        masked = torch.rand(ids.shape, generator=torch.Generator().manual_seed(step)) < 0.15
        given, labels = ids.masked_fill(masked, MASK), ids.masked_fill(~masked, IGNORED)
        loss = engine(given.to(engine.device), labels.to(engine.device))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    print("losses:", losses)
