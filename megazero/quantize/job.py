"""Quantizes a model, from a folder to a folder; every rank of a job calls `quantize`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from megazero.checkpoint.disk import Disk
from megazero.checkpoint.tensor_file import write_bytes
from megazero.checkpoint.writer import SHARD_BYTES
from megazero.errors import ConfigError
from megazero.formats.hf.packed import FIELD
from megazero.formats.hf.writer import write_hf
from megazero.mpu.context import ParallelContext
from megazero.quantize.blocks import BlockModel, Samples
from megazero.quantize.export import Layout, QuantizedSource
from megazero.quantize.layers import LayerQuantizer, QuantizedBlock
from megazero.quantize.recipe import Recipe
from megazero.quantize.report import Report, WeightReport

REPORT = "quantization_report"
"""The name of the report's files, a text and a JSON."""


def quantize(
    model: BlockModel,
    recipe: Recipe,
    samples: tuple[Samples | None, Samples | None],
    out: str | Path,
    context: ParallelContext,
    *,
    architecture: str | None = None,
    max_shard_bytes: int = SHARD_BYTES,
    tell: Callable[[str], None] = print,
) -> Report | None:
    """Write the quantized model to the folder `out`; returns the report, on the first rank.

    Args:
        model: the model.
        recipe: scheme and method.
        samples: those that calibrate, which plain rounding can do without, and those that measure.
        out: a folder that does not exist yet, or is empty.
        context: all ranks, which share the samples.
        architecture: the class in transformers; None for one that can hold the codes.
        max_shard_bytes: the size at which another file is begun.
        tell: takes a line for each layer, on the first rank.

    Raises:
        MegazeroError: the model cannot be quantized or written, or the data cannot be read.
    """
    if samples[0] is None and recipe.method != "rtn":
        raise ConfigError(
            f"`--calibrate` must give {recipe.method} samples, but gives none; add it, or correct `--split` "
            "and `--calibrate-samples`"
        )
    layout = Layout.of(model, recipe, architecture)
    walk = LayerQuantizer(model, recipe, context.world, samples, layout.coded)
    if context.rank > 0:
        for _ in walk.blocks():
            pass
        return None
    rows: list[WeightReport] = []

    def told() -> Iterator[QuantizedBlock]:
        for block in walk.blocks():
            rows.extend(block.rows)
            if block.rows:
                tell(f"layer {block.part}: {', '.join(row.short for row in block.rows)}")
            yield block

    settings, section = model.config.model, {FIELD: layout.quantization_config()}
    where, name = model.saved.place.parent, layout.architecture.name
    extras, _ = model.known.extras(settings, model.config.tokenizer, where, name)
    source = QuantizedSource(model.source, told())
    exported = write_hf(
        source,
        settings,
        model.saved.vocab_size,
        out,
        dtype=recipe.grid.dtype,
        max_shard_bytes=max_shard_bytes,
        extras=replace(extras, labels=(), settings=section),
        packing=lambda tensor: layout.stored(tensor, source),
    )
    source.finish()
    before = sum(tensor.size for tensor in layout.tensors)
    after = before - sum(row.bytes_before - row.bytes_after for row in rows)
    report = Report(
        str(recipe), walk.count, tuple(rows), layout.skipped(), (before, after), walk.held_out, walk.losses
    )
    for suffix, text in ((".txt", report.as_text()), (".json", report.as_json())):
        write_bytes(Disk(), exported.folder / (REPORT + suffix), text.encode())
    return report
