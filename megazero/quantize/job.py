"""Quantizes a model, from a folder to a folder; every rank of a job calls `quantize`."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from megazero.checkpoint.disk import Disk, appear
from megazero.checkpoint.writer import SHARD_BYTES
from megazero.errors import CheckpointError, ConfigError
from megazero.mpu.context import ParallelContext
from megazero.quantize.blocks import BlockModel, Samples
from megazero.quantize.export import FolderWriter, Layout, in_short
from megazero.quantize.layers import LayerQuantizer
from megazero.quantize.recipe import Recipe
from megazero.quantize.report import Report, WeightReport


@dataclass(frozen=True)
class Calibration:
    """The samples of a dataset.

    Attributes:
        prefix: the dataset.
        samples: the most samples that calibrate: the first of its training part.
        held_out: the most samples of its validation part on which perplexity is measured.
        split: its parts; None for those of the training.
    """

    prefix: str
    samples: int = 128
    held_out: int = 64
    split: str | None = None

    def of(self, model: BlockModel) -> tuple[Samples | None, Samples | None]:
        """Open the samples."""
        return model.samples(self.prefix, self.split, (self.samples, self.held_out))


def quantize(
    model: BlockModel,
    recipe: Recipe,
    calibration: Calibration | None,
    out: str | Path,
    context: ParallelContext,
    *,
    architecture: str | None = None,
    max_shard_bytes: int = SHARD_BYTES,
    tell: Callable[[str], None] = print,
) -> Report | None:
    """Write the quantized model to the folder `out`, which appears whole; returns the report on the first rank.

    Args:
        model: the model.
        recipe: scheme and method.
        calibration: the samples; None for none, which plain rounding can do without.
        out: a folder that does not exist yet, or is empty.
        context: all ranks, which share the samples.
        architecture: the class in transformers, if not the first that can hold it.
        max_shard_bytes: the size at which another file is begun.
        tell: takes a line for each layer, on the first rank.

    Raises:
        MegazeroError: the model cannot be quantized or written, or the data cannot be read.
    """
    out = Path(os.path.abspath(out))
    if calibration is None and recipe.method != "rtn":
        raise ConfigError(f"`--calibrate` must name a dataset for {recipe.method}, but is not given; add it")
    if os.path.lexists(out) and (not out.is_dir() or os.listdir(out)):
        raise CheckpointError(f"`{out}` must be new or an empty folder, but is neither; name another")
    layout = Layout.of(model, recipe, architecture)
    samples = (None, None) if calibration is None else calibration.of(model)
    if calibration is not None and samples[0] is None:
        raise ConfigError(
            "`--split` must give the training some data to calibrate on, but gives none; correct it"
        )
    walk = LayerQuantizer(model, recipe, context.world, samples, layout.coded.__contains__)
    if context.rank > 0:
        for _ in walk.blocks():
            pass
        return None

    def fill(folder: Path) -> Report:
        writer = FolderWriter(disk, folder, model, layout, recipe, max_shard_bytes)
        rows: list[WeightReport] = []
        for block in walk.blocks():
            writer.add(block)
            rows += block.rows
            if block.rows:
                tell(f"layer {block.part}: " + _errors(block.rows))
        grid = recipe.grid
        scheme = (
            f"W{grid.bits}"
            + "A8" * recipe.rounds_inputs
            + (f" in groups of {grid.group}" if grid.group else "")
        )
        skipped = in_short(layout.left())
        report = Report(scheme, recipe.method, walk.count, tuple(rows), skipped, 0, 0, walk.held_out)
        if walk.losses is not None:
            report = replace(report, loss_before=walk.losses.before, loss_after=walk.losses.after)
        return writer.finish(report)

    disk = Disk()
    try:
        return appear(disk, out, fill)
    except OSError as error:
        raise CheckpointError(f"`{out}` must be written, but cannot be: {error}") from error


def _errors(rows: tuple[WeightReport, ...]) -> str:
    return ", ".join(
        f"{row.name.split('.', 2)[2].removesuffix('.weight')} "
        + (row.method if row.error is None else f"{100 * row.error:.2f}%")
        for row in rows
    )
