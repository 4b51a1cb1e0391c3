"""Who is compared in `train_step.py`, `zero.py` and `pipeline.py`: one file per way to train.

Each has ``build(shape, rank, world_size, **options) -> step``, where ``step()`` trains one optimizer step on
one rank's micro-batches of fixed random tokens and returns a loss: the last micro-batch's, or the mean of
all if that is available. A pipeline's step also has ``take_action_times()``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import torch


@dataclass(frozen=True)
class Shape:
    """The model and the batch, the same for all: a 23M-parameter GPT with a tied vocabulary."""

    layers: int = 6
    hidden: int = 512
    heads: int = 8
    sequence: int = 512
    vocab: int = 8192
    micro_batch: int = 4
    accumulations: int = 2
    dtype: str = "bf16"
    device: str = "cpu"
    family: str = "gpt"

    @property
    def torch_dtype(self) -> torch.dtype:
        return {"bf16": torch.bfloat16, "fp32": torch.float32}[self.dtype]

    @property
    def tokens_per_step(self) -> int:
        """The tokens of one rank per step."""
        return self.micro_batch * self.sequence * self.accumulations

    def batches(self, rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(tokens, labels) [b, s] of each accumulation."""
        generator = torch.Generator().manual_seed(rank)
        size = (self.accumulations, self.micro_batch, self.sequence + 1)
        text = torch.randint(0, self.vocab, size, generator=generator).to(self.device)
        return [(t[:, :-1].contiguous(), t[:, 1:].contiguous()) for t in text]


SHAPES: Mapping[str, Shape] = MappingProxyType(
    {
        "23M": Shape(),
        "124M": Shape(layers=12, hidden=768, heads=12, sequence=1024, vocab=50304, micro_batch=16),
        "350M": Shape(layers=24, hidden=1024, heads=16, sequence=2048, vocab=50304, micro_batch=8),
        "1.3B": Shape(layers=24, hidden=2048, heads=16, sequence=2048, vocab=50304, micro_batch=4),
        "6.7B (8 of 32 layers)": Shape(
            layers=8, hidden=4096, heads=32, sequence=2048, vocab=50304, micro_batch=4
        ),
    }
)
"""Shapes by the number of parameters. On a GPU the first is bound by launches, the others by products."""


class ActionTime(NamedTuple):
    """How long one computation of a pipeline took.

    Attributes:
        stage: the stage that computed it.
        op: F forward, B backward, I and W its two halves (input and weight gradients), U what follows the
            schedule (sum of the tied gradients, clipping, optimizer).
        chunk: the model chunk; 0 for U.
        seconds: the time without waiting for other stages, except for U.
    """

    stage: int
    op: str
    chunk: int
    seconds: float
