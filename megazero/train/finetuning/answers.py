"""The model's scores of every sample of a set, the same on all ranks of any layout."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megazero.models import SCORES, LabelledBatch
from megazero.mpu import ParallelContext
from megazero.train.engine import Engine
from megazero.train.feed import Feed
from megazero.train.losses import Losses


@dataclass(frozen=True)
class Answers:
    """The answers of an evaluation.

    Attributes:
        losses: the losses over the samples with a label, by term.
        counted: number of samples with a label.
        scores: float32 [samples, classes].
    """

    losses: Losses
    counted: int
    scores: np.ndarray


def answer(engine: Engine, feed: Feed[LabelledBatch], count: int, batch_size: int, classes: int) -> Answers:
    """Evaluate the first `count` samples of a feed, each once, by forward passes of whole global batches.

    Every rank calls this. The feed goes on with samples that do not count until the last batch is full.
    """
    spec, starts = feed.spec, range(0, count, batch_size)
    losses, counted, outputs = engine.evaluate(
        feed.micro_batches(start, batch_size // spec.stride) for start in starts
    )
    own = spec.data_parallel_rank * spec.micro_batch_size
    parts = {
        start + i * spec.stride + own: output[SCORES]
        for start, by_number in zip(starts, outputs, strict=True)
        for i, output in by_number.items()
    }
    scores = _gathered(parts, (len(starts) * batch_size, classes), engine.context)
    return Answers(losses, counted, scores[:count])


def _gathered(parts: dict[int, Tensor], shape: tuple[int, int], context: ParallelContext) -> np.ndarray:
    """The scores of all ranks, from those here by the numbers of their first samples.

    Only one rank has those of a micro-batch, so that their sum is exact.
    """
    scores = torch.zeros(shape, dtype=torch.float32, device=context.device)
    if context.tp.rank == 0:
        for first, part in parts.items():
            scores[first : first + len(part)] = part
    context.world.all_reduce(scores).wait()
    return scores.cpu().numpy()
