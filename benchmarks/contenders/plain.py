"""A plain PyTorch GPT and loop as written by hand: SDPA, autocast, `AdamW(fused=True)`, clipping."""

from __future__ import annotations

import contextlib
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.contenders import Shape


class Layer(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        h = shape.hidden
        self.heads = shape.heads
        self.norm1, self.norm2 = nn.LayerNorm(h), nn.LayerNorm(h)
        self.qkv, self.out = nn.Linear(h, 3 * h), nn.Linear(h, h)
        self.up, self.down = nn.Linear(h, 4 * h), nn.Linear(4 * h, h)

    def forward(self, x):
        b, s, h = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, s, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, s, h))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class PlainGPT(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.word = nn.Embedding(shape.vocab, shape.hidden)
        self.position = nn.Embedding(shape.sequence, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.hidden)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, tokens, labels):
        x = self.word(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        logits = F.linear(self.norm(x), self.word.weight)
        return F.cross_entropy(logits.float().view(-1, logits.shape[-1]), labels.view(-1))


ADAMW = MappingProxyType({"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True})


def make_step(model: nn.Module, shape: Shape, rank: int, no_sync=None, optimizer=None):
    """The training step of `model(tokens, labels) -> loss`; `optimizer` is AdamW if none is given."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), **ADAMW)
    batches = shape.batches(rank)
    low = shape.dtype != "fp32"

    def step() -> float:
        for i, (tokens, labels) in enumerate(batches):
            last = i == len(batches) - 1
            with contextlib.nullcontext() if last or no_sync is None else no_sync():
                with torch.autocast(shape.device, dtype=shape.torch_dtype, enabled=low):
                    loss = model(tokens, labels)
                (loss / len(batches)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step


def build(shape: Shape, rank: int, world_size: int):
    return make_step(PlainGPT(shape).to(shape.device), shape, rank)


def build_compiled(shape: Shape, rank: int, world_size: int):
    return make_step(torch.compile(PlainGPT(shape).to(shape.device)), shape, rank)


def build_ddp(shape: Shape, rank: int, world_size: int):
    model = nn.parallel.DistributedDataParallel(PlainGPT(shape).to(shape.device))
    return make_step(model, shape, rank, model.no_sync)


def build_zero_redundancy(shape: Shape, rank: int, world_size: int):
    """DDP with PyTorch's `ZeroRedundancyOptimizer`: its state is distributed by whole parameters."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = nn.parallel.DistributedDataParallel(PlainGPT(shape).to(shape.device))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **ADAMW)
    return make_step(model, shape, rank, model.no_sync, optimizer)


def build_tuned(shape: Shape, rank: int, world_size: int):
    """The plain loop with megazero's allocator setting, to show what the rest is worth."""
    from megazero.mpu.malloc import keep_freed_memory

    keep_freed_memory()
    return build(shape, rank, world_size)
