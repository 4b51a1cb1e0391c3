"""Outputs of a model for the rows of samples, on any layout: a reward of each, or the logs of all tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from megazero.config.tree.config import Config
from megazero.data.build_report import ProgressLog
from megazero.errors import CheckpointError
from megazero.models.batch import Columns
from megazero.models.classifier import SCORES
from megazero.models.objective import LOGS
from megazero.train.step.engine import Engine
from megazero.train.step.feed import Feed


def outputs_of(engine: Engine, config: Config, feed: Feed[Any], log: ProgressLog) -> Iterator[np.ndarray]:
    """The outputs of each global batch of pairs, the same on every rank; every rank takes them all.

    They are float32 [b, 2, 1] rewards, or [b, 2, T] log-probabilities of the next tokens, whether these count
    or not, and 0 behind a micro-batch's longest row.

    Args:
        feed: the pairs in the files' order, in whole global batches and without dropout.
        log: reports the progress.
    """
    spec, context, size = feed.spec, engine.context, config.batch.global_batch_size
    assert size is not None, "`completed` sets it"
    width = config.model.seq_length if config.model.num_classes is None else 1
    columns = Columns.of(config.parallel, context)
    starts = range(0, len(feed.dataset), size)
    for start in log.over(starts, len(starts)):
        (by_number,) = engine.evaluate([feed.micro_batches(start, size // spec.stride)]).outputs
        values = torch.zeros(size, 2, width, device=context.device)
        for i, output in by_number.items() if context.tp.rank == 0 else ():
            first = i * spec.stride + spec.data_parallel_rank * spec.micro_batch_size
            rows = values[first : first + spec.micro_batch_size]
            if SCORES in output:
                rows[..., 0] = output[SCORES] * (columns.rank == 0)
            else:
                logs = output[LOGS]
                own = columns.own(np.arange(len(logs) * columns.ranks)[None])[0]
                rows[..., torch.from_numpy(own).to(context.device)] = logs.t().reshape(len(rows), 2, -1)
        context.world.all_reduce(values).wait()  # each value is one rank's, and the others have zeros
        yield values.cpu().numpy()


def checked(scores: np.ndarray, what: str) -> np.ndarray:
    """The scores as they are. Raises CheckpointError if one is NaN or infinite; all ranks have the same."""
    if not np.isfinite(scores).all():
        raise CheckpointError(f"{what} must be finite, but some are NaN or infinite; check the weights")
    return scores
