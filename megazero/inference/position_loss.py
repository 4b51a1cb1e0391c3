"""The loss of a language model by position, which shows how much it gains from a longer context.

It is the mean loss over validation samples at each position. Positions count from the start of the sample, or
from the start of the document with `--reset-position-ids`, as in training.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from megazero.config.derive import PipelineShape
from megazero.config.tree.config import Config
from megazero.config.tree.recompute import RecomputeConfig
from megazero.config.tree.zero import ZeroConfig
from megazero.errors import ConfigError, DataError, NumericsError
from megazero.inference.sample_loss import LossMeter, step_shape, trained_chunks
from megazero.models.batch import Batch, TextCollate
from megazero.models.sample_losses import PositionLosses
from megazero.mpu.context import ParallelContext
from megazero.pictures.style import LIGHT, Theme, new_figure, save, styled
from megazero.pipeline.executor import Evaluator
from megazero.train.parts.chunks import programs_of
from megazero.train.parts.families import family_of
from megazero.train.parts.vocabulary import build_vocabulary

_FIRST = 16  # positions of the first interval of a table; every other interval ends at twice its begin
_POINTS = 64  # points of a curve


@dataclass(frozen=True)
class PositionLoss:
    """The loss of a model at each position.

    Attributes:
        name: the name of the model in tables and pictures.
        sums: the weighted sum of losses over all samples in nats, float64 [s].
        counted: the sum of the loss weights over all samples, float64 [s].
    """

    name: str
    sums: np.ndarray
    counted: np.ndarray

    def mean(self, begin: int, end: int) -> float:
        """The mean loss at positions begin to end - 1; NaN if their weights are 0."""
        counted = float(self.counted[begin:end].sum())
        return float(self.sums[begin:end].sum()) / counted if counted else float("nan")

    def write(self, path: Path) -> None:
        """Write it as JSON."""
        facts = {"name": self.name, "sums": self.sums.tolist(), "counted": self.counted.tolist()}
        path.write_text(json.dumps(facts), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> PositionLoss:
        """Read what `write` wrote. Raises DataError if the file cannot be read, or has another form."""
        try:
            facts = json.loads(path.read_text(encoding="utf-8"))
            sums, counted = (np.array(facts[name], dtype=np.float64) for name in ("sums", "counted"))
            name = str(facts["name"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"`--beside` must name a file that `--by-position` wrote, but {path} is not: {error!r}; give "
                "a loss_by_position.json"
            ) from error
        if sums.ndim != 1 or sums.shape != counted.shape:
            raise DataError(
                f"`{path}` must hold a sum and a count for each position, but does not; measure anew"
            )
        return cls(name, sums, counted)


class PositionMeter(LossMeter[Batch]):
    """Measures losses by position; the chunks of its model are `PositionLosses`."""

    def by_position(self, samples: range, length: int) -> np.ndarray:
        """The sums of losses and of loss weights by position, float64 [2, length]; every rank calls this."""
        totals = torch.zeros(2, length, dtype=torch.float64, device=self.context.device)
        for start in range(0, len(samples), self.samples_per_step):
            step = samples[start : start + self.samples_per_step]
            for slot, arrays, losses in self.evaluated(step):
                real = max(0, min(slot.stop, len(step)) - slot.start)  # rows that do not repeat a sample
                places = arrays["position_ids"][:real].ravel()
                pair = losses.t()[:real].double().cpu().numpy(), arrays["loss_mask"][:real]
                for total, values in zip(totals, pair, strict=True):
                    weights = values.ravel().astype(np.float64)
                    total += torch.from_numpy(np.bincount(places, weights, length)).to(total)
        return self.summed(totals)


def measure_position_loss(config: Config, context: ParallelContext, samples: int, name: str) -> PositionLoss:
    """Measure validation samples of a configured run under its `--load`; every rank calls this.

    Args:
        config: the run's configuration.
        context: this rank's process groups and device.
        samples: the most samples to measure.
        name: the name of the model in tables and pictures.

    Raises:
        MegazeroError: the checkpoint or the data cannot be read, there are no validation samples, the model
            is not a language model, or a loss is not finite.
    """
    config = config.model_copy(update={"zero": ZeroConfig(), "recompute": RecomputeConfig()})
    vocabulary, family = build_vocabulary(config), family_of(config.model)
    _, chunks = trained_chunks(config, vocabulary, context)
    wrapped = {number: PositionLosses.of(chunk) for number, chunk in chunks.items()}
    dataset = family.samples.datasets(config, vocabulary, (0, samples, 0))[1]
    if dataset is None:
        raise ConfigError("`split` must give the validation some data, but gives none; correct it")
    meter = PositionMeter(
        dataset,
        Evaluator(wrapped, context.pp, context.device),
        programs_of(config.zero, PipelineShape.of(config)).evaluate,
        TextCollate.of(config, vocabulary.size, context, None),
        context,
        step_shape(config),
    )
    sums, counted = meter.by_position(range(min(samples, len(dataset))), config.model.seq_length)
    if not np.isfinite(sums).all():
        raise NumericsError(
            f"`loss` at position {int(np.argmin(np.isfinite(sums)))} must be finite, but is not; the model "
            "is damaged, or its precision is too low"
        )
    return PositionLoss(name, sums, counted)


def table(measured: Sequence[PositionLoss]) -> str:
    """A table of mean losses in `intervals`, with a column for each model."""
    width = max(9, *(len(loss.name) for loss in measured))
    lines = ["   positions  " + "  ".join(f"{loss.name:>{width}}" for loss in measured)]
    for begin, end in intervals(max(len(loss.sums) for loss in measured)):
        means = "  ".join(f"{loss.mean(begin, end):{width}.4f}" for loss in measured)
        lines.append(f"{begin:5} - {end - 1:4}  {means}")
    return "\n".join(lines)


def intervals(length: int) -> Iterator[tuple[int, int]]:
    """Yield [begin, end) of intervals over all positions, each as long as all those before it together."""
    begin = 0
    while begin < length:
        end = min(length, max(_FIRST, 2 * begin))
        yield begin, end
        begin = end


def draw(measured: Sequence[PositionLoss], path: Path, theme: Theme = LIGHT) -> None:
    """Draw the mean loss against the position, on a logarithmic axis, into a file.

    Raises ConfigError if matplotlib is not installed, or the file cannot be written.
    """
    with styled(theme):
        tokens = min(int(loss.counted.sum()) for loss in measured)
        about = (
            f"{', '.join(loss.name for loss in measured)}: mean over {tokens:,} tokens of the validation data"
        )
        figure = new_figure("Loss by position", about, height=4.0)
        axes = figure.subplots()
        for loss in measured:
            edges = np.unique(np.geomspace(1, len(loss.sums), _POINTS).astype(np.int64))
            points = [loss.mean(begin, end) for begin, end in pairwise(edges.tolist())]
            axes.plot(edges[:-1], points, label=loss.name)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.set(xlabel="position (tokens before it)", ylabel="loss (nats per token)")
        axes.legend()
        save(figure, path)
