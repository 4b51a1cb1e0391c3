"""The model's scores of every sample of a set, the same on all ranks of any layout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megazero.models import LabelledBatch
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
    context, stride = engine.context, feed.spec.stride
    places: list[tuple[int, list[Tensor]]] = []

    def batches() -> Iterator[list[LabelledBatch]]:
        for start in range(0, count, batch_size):
            micro_batches = feed.micro_batches(start, batch_size // stride)
            for i, batch in enumerate(micro_batches):
                first = start + i * stride + feed.spec.data_parallel_rank * feed.spec.micro_batch_size
                assert batch.answers is not None, "batches without dropout keep the answers"
                places.append((first, batch.answers))
            yield micro_batches

    losses, counted = engine.evaluate(batches())
    scores = _gathered(places, (-(-count // batch_size) * batch_size, classes), context)
    return Answers(losses, counted, scores[:count])


def _gathered(
    places: list[tuple[int, list[Tensor]]], shape: tuple[int, int], context: ParallelContext
) -> np.ndarray:
    """The scores of all ranks: only one rank has those of a micro-batch, so that their sum is exact."""
    scores = torch.zeros(shape, dtype=torch.float32, device=context.device)
    if context.tp.rank == 0:
        for first, parts in places:
            for part in parts:
                scores[first : first + len(part)] = part
    context.world.all_reduce(scores).wait()
    return scores.cpu().numpy()
