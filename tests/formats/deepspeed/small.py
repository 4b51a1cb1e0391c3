"""The model of the checkpoints in ``checkpoints.zip``, which DeepSpeed trained."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WORDS, WIDTH = 7, 5


class Small(nn.Module):
    """A model with odd sizes, a tied head, a frozen layer, a buffer that changes and one not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.inner = nn.Linear(WIDTH, 3)
        self.frozen = nn.Linear(3, WIDTH).requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("passing", torch.ones(2), persistent=False)

    def forward(self, words: Tensor, labels: Tensor) -> Tensor:
        self.seen += 0.5
        x = self.embedding(words)
        x = x + self.frozen(torch.tanh(self.inner(x))) * self.scale
        return F.cross_entropy(self.head(x).float(), labels)


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Two parameter groups: matrices with weight decay, the rest without."""
    params = [param for param in model.parameters() if param.requires_grad]
    return [
        {"params": [param for param in params if param.dim() > 1]},
        {"params": [param for param in params if param.dim() < 2], "weight_decay": 0.0},
    ]


def small_batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Tokens and labels of one micro-batch of a rank."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return tuple(torch.randint(0, WORDS, (2, 2), generator=generator))
