"""The loads of experts as a picture: heat maps of layers and experts, and of one layer over time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from megazero.commands.moe_report.balance import dead_experts
from megazero.commands.moe_report.loads import LayerLoad, LoadRecord
from megazero.pictures.style import Theme, count_axis, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.collections import QuadMesh
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure

_FURTHEST = 3  # colors end at 1/8 and 8 times an even share
_ROW, _MOST_ROWS = 0.3, 40  # inches of a row, and rows that are not made flatter


def idlest_layer(record: LoadRecord) -> int:
    """The number of the layer that has the expert with the smallest share."""
    return min(record.layers, key=lambda load: min(load.shares)).layer


def figure_of(
    records: Sequence[LoadRecord], shown: LoadRecord, layer: int, threshold: float, run: str, theme: Theme
) -> Figure:
    """Draw the loads of a run; it is called within `styled`.

    The first panel is of the record `shown`, where experts below the threshold are marked as dead; the second
    is of one layer in all records, if there are several.
    """
    from matplotlib.patheffects import withStroke

    panels = 2 if len(records) > 1 else 1
    widest = max(len(load.tokens) for load in shown.layers)
    rows = max(len(shown.layers), widest if panels == 2 else 0)
    dead = dead_experts(shown, threshold)
    facts = f"{len(shown.layers)} layers with {widest} experts; "
    facts += f"× gets less than {threshold:g} of an even share" if dead else "no expert is dead"
    height = max(3.0, 1.7 + _ROW * min(rows, _MOST_ROWS))
    figure = new_figure(f"Load of experts in run {run}", facts, height=height)
    axes = figure.subplots(1, panels, squeeze=False)[0]
    mesh = _draw_layers(axes[0], shown, theme)
    places = {load.layer: row for row, load in enumerate(shown.layers)}
    crosses = [(expert.expert, places[expert.layer]) for expert in dead]
    if crosses:
        halo = [withStroke(linewidth=3.5, foreground=theme.paper)]
        axes[0].scatter(*zip(*crosses, strict=True), marker="x", color=theme.ink, s=22, path_effects=halo)
    if panels == 2:
        _draw_history(axes[1], records, layer, theme)
    ticks = range(-_FURTHEST, _FURTHEST + 1)
    bar = figure.colorbar(mesh, ax=axes[-1], ticks=list(ticks), label="share of tokens (even = 1)")
    bar.ax.set_yticklabels([str(2**tick) if tick >= 0 else f"1/{2**-tick}" for tick in ticks])
    return figure


def _draw_layers(axes: Axes, record: LoadRecord, theme: Theme) -> QuadMesh:
    widest = max(len(load.tokens) for load in record.layers)
    grid = [[*_levels(load), *[math.nan] * (widest - len(load.tokens))] for load in record.layers]
    mesh = _heat_map(axes, [at - 0.5 for at in range(widest + 1)], grid, theme)
    apart = math.ceil(len(record.layers) / _MOST_ROWS)
    named = range(0, len(record.layers), apart)
    axes.set_yticks(named, [str(record.layers[row].layer) for row in named])
    axes.invert_yaxis()
    axes.set(xlabel="expert", ylabel="layer", title=f"iteration {record.iteration}")
    count_axis(axes)
    return mesh


def _draw_history(axes: Axes, records: Sequence[LoadRecord], layer: int, theme: Theme) -> None:
    loads = [next(load for load in record.layers if load.layer == layer) for record in records]
    at = [record.iteration for record in records]
    middles = [(one + other) / 2 for one, other in pairwise(at)]
    edges = [2 * at[0] - middles[0], *middles, 2 * at[-1] - middles[-1]]
    _heat_map(axes, edges, list(zip(*map(_levels, loads), strict=True)), theme)
    axes.set(xlabel="iteration", ylabel="expert", title=f"layer {layer} over time")
    count_axis(axes)
    count_axis(axes, "y")


def _heat_map(axes: Axes, edges: Sequence[float], grid: Sequence[Sequence[float]], theme: Theme) -> QuadMesh:
    """Draw rows of levels; a level that is not a number stays empty, where a layer has fewer experts."""
    axes.set_facecolor(theme.grid)
    axes.grid(visible=False)
    rows = [row - 0.5 for row in range(len(grid) + 1)]
    return axes.pcolormesh(edges, rows, grid, cmap=_colors(theme), vmin=-_FURTHEST, vmax=_FURTHEST)


def _colors(theme: Theme) -> Colormap:
    """From too few tokens over the paper's color to too many."""
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("share", (theme.series[0], theme.paper, theme.series[3]))


def _levels(load: LayerLoad) -> list[float]:
    """log2 of each share, limited to the range of the colors."""
    return [max(-_FURTHEST, math.log2(share)) if share > 0 else -_FURTHEST for share in load.shares]
