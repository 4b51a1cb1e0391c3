"""The distribution of a metric over a dataset: percentiles and pictures."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from megazero.data_efficiency.metric_index import MetricIndex
from megazero.pictures import check_suffix, new_figure

PERCENTILES = (0, 5, 25, 50, 75, 95, 100)
_BARS = 60
_POINTS = 2000


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


def draw_values(index: MetricIndex, name: str, path: Path) -> None:
    """Draw a histogram of the values into a file (.png, .svg or .pdf).

    Raises ConfigError if matplotlib is not installed, or for another suffix.
    """
    check_suffix(path)
    edges, samples = bars(index)
    figure = new_figure(7.0, 4.0)
    axes = figure.subplots()
    axes.stairs(samples, edges, fill=True)
    middle = percentiles(index, (50,))[0]
    axes.axvline(middle, color="black", linewidth=0.8)
    axes.set(xlabel=name, ylabel="samples", title=f"{len(index):,} samples, median {middle:,}")
    figure.savefig(path, dpi=120)


def draw_sum(values: np.ndarray, name: str, path: Path) -> None:
    """Draw an accumulated vector, int64 [n], largest entries first, on logarithmic axes.

    Errors as in `draw_values`.
    """
    check_suffix(path)
    ordered = np.sort(values)[::-1]
    ranks = np.unique(np.geomspace(1, ordered.size, _POINTS).astype(np.int64))
    figure = new_figure(7.0, 4.0)
    axes = figure.subplots()
    axes.plot(ranks, ordered[ranks - 1], drawstyle="steps-mid")
    axes.set_xscale("log")
    axes.set_yscale("symlog")
    if ordered[-1] >= 0:
        axes.set_ylim(bottom=0)
    axes.set(
        xlabel="rank of the entry",
        ylabel=name,
        title=f"{values.size:,} entries, sum {sum(values.tolist()):,}",
    )
    figure.savefig(path, dpi=120)


def check_drawing() -> None:
    """Raise ConfigError if matplotlib is not installed."""
    new_figure(1.0, 1.0)
