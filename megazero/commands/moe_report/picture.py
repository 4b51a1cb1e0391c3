"""The loads of experts as a picture: heat maps of layers and experts, and of one layer over time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megazero.commands.moe_report.balance import dead_experts
from megazero.commands.moe_report.loads import LayerLoad, LoadRecord
from megazero.pictures import check_suffix, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.collections import QuadMesh
    from matplotlib.figure import Figure

_FURTHEST = 3  # colours end at 1/8 and 8 times an even share
_INCHES_PER_ROW = 0.3


def idlest_layer(record: LoadRecord) -> int:
    """The number of the layer that has the expert with the smallest share."""
    return min(record.layers, key=lambda load: min(load.shares)).layer


def draw(records: Sequence[LoadRecord], shown: LoadRecord, layer: int, threshold: float, path: Path) -> None:
    """Draw the loads into a file, in the format of its suffix. Needs matplotlib.

    Args:
        records: all records, for the second panel, which is left out if there is only one.
        shown: the record of the first panel.
        layer: the layer of the second panel.
        threshold: the share below which an expert is marked as dead.
        path: the file.

    Raises:
        ConfigError: matplotlib is not installed, or the suffix is not one of `pictures.SUFFIXES`.
    """
    check_suffix(path)
    figure_of(records, shown, layer, threshold).savefig(path, dpi=120)


def figure_of(records: Sequence[LoadRecord], shown: LoadRecord, layer: int, threshold: float) -> Figure:
    """The picture that `draw` writes; its arguments and errors are those of `draw`."""
    widest = max(len(load.tokens) for load in shown.layers)
    rows = max(len(shown.layers), widest if len(records) > 1 else 0)
    panels = 2 if len(records) > 1 else 1
    width, height = (
        2 + panels * min(12.0, max(5.0, 0.35 * widest)),
        max(3.0, 1.6 + _INCHES_PER_ROW * min(rows, 40)),
    )
    figure = new_figure(width, height)
    axes = figure.subplots(1, panels, squeeze=False)[0]
    mesh = _draw_layers(axes[0], shown, threshold)
    if panels == 2:
        _draw_history(axes[1], records, layer)
    ticks = range(-_FURTHEST, _FURTHEST + 1)
    bar = figure.colorbar(mesh, ax=axes[-1], ticks=list(ticks), label="share of the tokens, 1 is even")
    bar.ax.set_yticklabels([str(2**tick) if tick >= 0 else f"1/{2**-tick}" for tick in ticks])
    return figure


def _draw_layers(axes: Axes, record: LoadRecord, threshold: float) -> QuadMesh:
    widest = max(len(load.tokens) for load in record.layers)
    grid = [[*_colours(load), *[math.nan] * (widest - len(load.tokens))] for load in record.layers]
    mesh = _heat_map(axes, list(range(widest)), grid)
    rows = {load.layer: row for row, load in enumerate(record.layers)}
    dead = dead_experts(record, threshold)
    axes.plot([expert.expert for expert in dead], [rows[expert.layer] for expert in dead], "x", color="black")
    axes.set_yticks(range(len(record.layers)), [str(load.layer) for load in record.layers])
    axes.invert_yaxis()
    axes.set(xlabel="expert", ylabel="layer", title=f"iteration {record.iteration} (× gets next to nothing)")
    return mesh


def _draw_history(axes: Axes, records: Sequence[LoadRecord], layer: int) -> None:
    loads = [next(load for load in record.layers if load.layer == layer) for record in records]
    over_time = list(zip(*map(_colours, loads), strict=True))
    _heat_map(axes, [record.iteration for record in records], over_time)
    axes.set(xlabel="iteration", ylabel="expert", title=f"layer {layer} over time")


def _heat_map(axes: Axes, columns: Sequence[int], grid: Sequence[Sequence[float]]) -> QuadMesh:
    axes.set_facecolor("#dddddd")  # where a layer has fewer experts
    return axes.pcolormesh(
        columns, range(len(grid)), grid, cmap="RdBu_r", shading="nearest", vmin=-_FURTHEST, vmax=_FURTHEST
    )


def _colours(load: LayerLoad) -> list[float]:
    """log2 of each share, limited to the range of the colours."""
    return [max(-_FURTHEST, math.log2(share)) if share > 0 else -_FURTHEST for share in load.shares]
