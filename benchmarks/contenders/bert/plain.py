"""A plain PyTorch BERT and loop as written by hand: SDPA, autocast, `AdamW(fused=True)`, clipping.

`masked_rows` lets only the masked tokens through the masked-LM head; without it the head takes all
positions, as transformers and megatron-core do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.contenders.bert import BertShape
from benchmarks.contenders.plain import ADAMW


class Micro(NamedTuple):
    """A micro-batch: int64 [b, s], `real` bool, `is_random` [b]; labels are -100 where nothing is asked."""

    tokens: Tensor
    types: Tensor
    real: Tensor
    labels: Tensor
    is_random: Tensor


def collate(shape: BertShape, arrays: dict[str, np.ndarray]) -> Micro:
    """The arrays of a dataset as tensors."""
    real = np.arange(shape.sequence) < arrays["lengths"][:, None]
    labels = np.where(arrays["loss_mask"] != 0, arrays["labels"], -100)
    parts = (arrays["tokens"], arrays["token_types"], real, labels, arrays["is_random"])
    return Micro(*(torch.from_numpy(np.ascontiguousarray(part)).to(shape.device) for part in parts))


class Layer(nn.Module):
    def __init__(self, shape: BertShape):
        super().__init__()
        h = shape.hidden
        self.heads, self.dropout = shape.heads, shape.dropout
        self.norm1, self.norm2 = nn.LayerNorm(h), nn.LayerNorm(h)
        self.qkv, self.out = nn.Linear(h, 3 * h), nn.Linear(h, h)
        self.up, self.down = nn.Linear(h, 4 * h), nn.Linear(4 * h, h)

    def forward(self, x, keys):
        b, s, h = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, s, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=keys, dropout_p=self.dropout)
        x = x + F.dropout(self.out(y.transpose(1, 2).reshape(b, s, h)), self.dropout)
        y = self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))
        return x + F.dropout(y, self.dropout)


class PlainBERT(nn.Module):
    def __init__(self, shape: BertShape, masked_rows: bool):
        super().__init__()
        h = shape.hidden
        self.masked_rows, self.dropout = masked_rows, shape.dropout
        self.word = nn.Embedding(shape.vocab, h)
        self.position = nn.Embedding(shape.sequence, h)
        self.kind = nn.Embedding(2, h)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(h)
        self.dense, self.dense_norm = nn.Linear(h, h), nn.LayerNorm(h)
        self.bias = nn.Parameter(torch.zeros(shape.vocab))
        self.pooler, self.binary = nn.Linear(h, h), nn.Linear(h, 2)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, batch: Micro) -> Tensor:
        """The loss: mean cross-entropy of the masked tokens, plus that of the samples."""
        places = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
        x = self.word(batch.tokens) + self.position(places) + self.kind(batch.types)
        x = F.dropout(x, self.dropout)
        keys = batch.real[:, None, None, :]
        for layer in self.layers:
            x = layer(x, keys)
        x = self.norm(x)
        order = self.binary(torch.tanh(self.pooler(x[:, 0])))
        labels = batch.labels
        if self.masked_rows:
            chosen = labels >= 0
            x, labels = x[chosen], labels[chosen]
        logits = F.linear(self.dense_norm(F.gelu(self.dense(x))), self.word.weight, self.bias)
        restored = F.cross_entropy(logits.float().view(-1, logits.shape[-1]), labels.view(-1))
        return restored + F.cross_entropy(order.float(), batch.is_random)


def make_step(
    model: nn.Module, shape: BertShape, rank: int, loss_of: Callable[[nn.Module, Micro], Tensor], no_sync=None
):
    """The training step of a model; `loss_of` runs it on a micro-batch."""
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    steps = shape.steps(rank, lambda arrays: collate(shape, arrays))
    low = shape.dtype != "fp32"

    def step() -> float:
        batches = next(steps)
        for i, batch in enumerate(batches):
            last = i == len(batches) - 1
            with contextlib.nullcontext() if last or no_sync is None else no_sync():
                with torch.autocast(shape.device, dtype=shape.torch_dtype, enabled=low):
                    loss = loss_of(model, batch)
                (loss / len(batches)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step


def distributed(model: nn.Module, world_size: int) -> tuple[nn.Module, Callable | None]:
    """The model in DDP if there are several ranks, and its way to leave gradients unsummed."""
    if world_size == 1:
        return model, None
    ddp = nn.parallel.DistributedDataParallel(model)
    return ddp, ddp.no_sync


def build(shape: BertShape, rank: int, world_size: int, masked_rows: bool = False):
    model, no_sync = distributed(PlainBERT(shape, masked_rows).to(shape.device), world_size)
    return make_step(model, shape, rank, lambda m, batch: m(batch), no_sync)
