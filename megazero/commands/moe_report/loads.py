"""Read how many tokens each expert got, from a file of metrics or a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megazero.commands.metrics_file import read_metrics
from megazero.errors import DataError

KEY = "tokens_per_expert"
"""The key of a step's metrics with a list of ``{"layer": i, "tokens": [...]}``, one per MoE layer."""

_SAVED = re.compile(r"layers\.(\d+)\.mlp\.router\.load")


@dataclass(frozen=True)
class LayerLoad:
    """The tokens that each expert of one layer got.

    Attributes:
        layer: the layer's number, from 0.
        tokens: a count per expert, dropped tokens included; at least one count is above 0.
    """

    layer: int
    tokens: tuple[float, ...]

    @property
    def shares(self) -> tuple[float, ...]:
        """The count of each expert as a multiple of the mean."""
        even = sum(self.tokens) / len(self.tokens)
        return tuple(count / even for count in self.tokens)


@dataclass(frozen=True)
class LoadRecord:
    """The loads of all MoE layers, in order, summed over one or several steps up to `iteration`."""

    iteration: int
    layers: tuple[LayerLoad, ...]


def read_loads(where: Path) -> tuple[LoadRecord, ...]:
    """Read a record for each step in a file of metrics that has loads, or the one of a checkpoint.

    Args:
        where: a file of `--metrics-jsonl`, a checkpoint's folder, or a run's folder, of which the newest
            whole checkpoint is read.

    Raises:
        DataError: `where` is neither, or holds no loads.
        CheckpointError: `where` is the folder of something else, or of a damaged checkpoint.
    """
    return (_of_checkpoint(where),) if where.is_dir() else _of_metrics(where)


def summed(records: Sequence[LoadRecord]) -> LoadRecord:
    """Add up the loads of records of the same layers."""
    layers = []
    for loads in zip(*(record.layers for record in records), strict=True):
        tokens = tuple(map(sum, zip(*(load.tokens for load in loads), strict=True)))
        layers.append(LayerLoad(loads[0].layer, tokens))
    return LoadRecord(records[-1].iteration, tuple(layers))


def _of_metrics(where: Path) -> tuple[LoadRecord, ...]:
    needs = f"an `iteration` and, if any, `{KEY}` per layer"
    steps = read_metrics(where, "WHERE", needs, _record)
    loaded = [step for step in steps if step.layers and all(sum(load.tokens) > 0 for load in step.layers)]
    if not loaded:
        raise DataError(
            f"{where} must have a step with `{KEY}`, but has none; take the metrics of a model with experts"
        )
    shapes = [[(load.layer, len(load.tokens)) for load in record.layers] for record in loaded]
    if any(shape != shapes[0] for shape in shapes):
        raise DataError(
            f"`{KEY}` must be of the same layers in every step, but in {where} it is not; split the file"
        )
    return tuple(loaded)


def _record(step: dict[str, Any]) -> LoadRecord:
    """Convert a step; raises ValueError, KeyError or TypeError if it has no iteration or wrong loads."""
    entries = step.get(KEY) or ()
    loads = [LayerLoad(int(entry["layer"]), tuple(map(float, entry["tokens"]))) for entry in entries]
    if any(not load.tokens or not min(load.tokens) >= 0 for load in loads):
        raise ValueError("counts must not be negative")
    return LoadRecord(int(step["iteration"]), tuple(sorted(loads, key=lambda load: load.layer)))


def _of_checkpoint(where: Path) -> LoadRecord:
    from megazero.checkpoint.locate import one_checkpoint
    from megazero.checkpoint.reader import CheckpointReader

    reader = CheckpointReader(one_checkpoint(where))
    keys = {int(match[1]): key for key in reader.shapes if (match := _SAVED.fullmatch(key.name))}
    if not keys:
        raise DataError(
            f"{reader.folder} must hold the loads of experts (`layers.N.mlp.router.load`), but has none; "
            "take a checkpoint of a model with experts"
        )
    loads = tuple(LayerLoad(layer, tuple(reader.tensor(keys[layer]).tolist())) for layer in sorted(keys))
    empty = [str(load.layer) for load in loads if not sum(load.tokens) > 0]
    if empty:
        raise DataError(
            f"every layer must have routed a token, but in {reader.folder} layer {', '.join(empty)} has not; "
            "take a checkpoint of a later step"
        )
    return LoadRecord(reader.manifest.iteration, loads)
