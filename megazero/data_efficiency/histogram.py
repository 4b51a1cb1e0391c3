"""The distribution of a metric over a dataset: percentiles and pictures."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from megazero.data_efficiency.metric_index import MetricIndex
from megazero.pictures.style import LIGHT, Theme, count_axis, new_figure, save, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PERCENTILES = (0, 5, 25, 50, 75, 95, 100)
_BARS = 60
_POINTS = 2000
_LABELS = MappingProxyType({"seqlen": "length (tokens)", "vocab_rarity": "rarity, summed over tokens (nats)"})


def percentiles(index: MetricIndex, shares: tuple[int, ...] = PERCENTILES) -> list[int]:
    """For each percentage of the samples, the least value that they do not exceed."""
    wanted = [-(-len(index) * share // 100) for share in shares]
    return [int(index.values[np.searchsorted(index.ends, max(1, count))]) for count in wanted]


def bars(index: MetricIndex, count: int = _BARS) -> tuple[np.ndarray, np.ndarray]:
    """Count the samples in at most `count` intervals of equal width, at least 1, over all values.

    Returns (edges, float64 [b + 1], and numbers of samples, int64 [b]).
    """
    low, high = float(index.values[0]), float(index.values[-1])
    width = max(1.0, (high - low + 1) / count)
    number = min(count, round((high - low + 1) / width))
    edges = low - 0.5 + width * np.arange(number + 1)
    place = np.minimum(((index.values - low) / width).astype(np.int64), number - 1)
    samples = np.bincount(place, weights=np.diff(index.ends, prepend=0), minlength=number)
    return edges, samples.astype(np.int64)


def draw_values(index: MetricIndex, name: str, path: Path, theme: Theme = LIGHT) -> None:
    """Draw a histogram of the values into a file (.png, .svg or .pdf).

    Raises ConfigError if matplotlib is not installed, or the file cannot be written.
    """
    edges, samples = bars(index)
    low, middle, high = percentiles(index, (5, 50, 95))
    with styled(theme):
        about = f"{path.parent}: 90 % of the samples are from {low:,} to {high:,}"
        figure = new_figure(f"{name} of {len(index):,} samples", about, height=4.0)
        axes = figure.subplots()
        axes.stairs(samples, edges, fill=True, color=theme.series[0], alpha=0.6)
        axes.axvline(middle, color=theme.ink, linestyle="--", label=f"median {middle:,}")
        axes.legend()
        _finish(figure, path, _label(name), "samples")


def draw_sum(values: np.ndarray, name: str, path: Path, theme: Theme = LIGHT) -> None:
    """Draw an accumulated vector, int64 [n], largest entries first, on logarithmic axes.

    Errors as in `draw_values`.
    """
    ordered = np.sort(values)[::-1]
    ranks = np.unique(np.geomspace(1, ordered.size, _POINTS).astype(np.int64))
    with styled(theme):
        title = f"{name}: {values.size:,} entries, sum {sum(values.tolist()):,}"
        figure = new_figure(title, f"{path.parent}: the largest entries first", height=4.0)
        axes = figure.subplots()
        axes.plot(ranks, ordered[ranks - 1], drawstyle="steps-mid", label=f"_{name}")
        axes.set(xscale="log", yscale="symlog")
        if ordered[-1] >= 0:
            axes.set_ylim(bottom=0)
        _finish(figure, path, "rank of the entry", _label(name))


def _label(name: str) -> str:
    return _LABELS.get(name, f"{name} (as the metric counts)")


def _finish(figure: Figure, path: Path, below: str, beside: str) -> None:
    (axes,) = figure.axes
    axes.set(xlabel=below, ylabel=beside)
    for which in "xy":
        count_axis(axes, which)
    save(figure, path)


def check_drawing() -> None:
    """Raise ConfigError if matplotlib is not installed."""
    with styled():
        pass
