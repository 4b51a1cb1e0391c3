"""One style for all pictures: sizes, colors, fonts, titles, units and files, on light and dark paper."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megazero.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg", ".pdf")
WIDTH = 9.0
"""The width of a picture in inches: that of a page, at 100 dots per inch."""


@dataclass(frozen=True)
class Theme:
    """The colors of a picture.

    Attributes:
        paper: the background.
        ink: text and axes.
        muted: text and lines that matter less.
        grid: lines of the grid, and empty areas.
        series: the colors of series, in order; people with any color vision can tell them apart
            (after Okabe and Ito, "Color Universal Design", 2008).
    """

    name: str
    paper: str
    ink: str
    muted: str
    grid: str
    series: tuple[str, ...]


LIGHT = Theme(
    "light",
    paper="#ffffff",
    ink="#1c2026",
    muted="#646c76",
    grid="#e3e6ea",
    series=("#0072b2", "#e08e00", "#009e73", "#cc4c00", "#b65c93", "#4ba3d9", "#7a7f87"),
)
DARK = Theme(
    "dark",
    paper="#16191f",
    ink="#e8eaed",
    muted="#9aa2ad",
    grid="#2d323a",
    series=("#4ba3d9", "#f0a830", "#2cc497", "#f2804a", "#dc94bd", "#8cc8f0", "#a7adb6"),
)
THEMES = {theme.name: theme for theme in (LIGHT, DARK)}


@contextmanager
def styled(theme: Theme = LIGHT) -> Iterator[None]:
    """Let matplotlib draw in the style of a theme within the block.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from cycler import cycler
        from matplotlib import rc_context
    except ImportError as error:
        raise ConfigError(
            "matplotlib must be installed to draw a picture, but is not; run `pip install matplotlib`"
        ) from error
    colors = {
        **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), theme.paper),
        **dict.fromkeys(("text.color", "axes.labelcolor", "axes.titlecolor"), theme.ink),
        **dict.fromkeys(("xtick.color", "ytick.color", "axes.edgecolor"), theme.muted),
        "grid.color": theme.grid,
        "axes.prop_cycle": cycler(color=theme.series),
    }
    shapes = {
        "font.size": 9,
        "axes.titlesize": 9.5,
        "axes.titlelocation": "left",
        "axes.labelsize": 9,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.formatter.useoffset": False,
        "axes.formatter.limits": (-4, 5),
        "lines.linewidth": 1.4,
        "legend.frameon": False,
        "legend.fontsize": 8.5,
        "svg.fonttype": "none",  # text stays text
        "svg.hashsalt": "megazero",  # the same picture gives the same bytes
        "savefig.dpi": 150,
    }
    with rc_context({**colors, **shapes}):
        yield


def new_figure(title: str, subtitle: str = "", *, height: float = 5.0, width: float = WIDTH) -> Figure:
    """Make an empty figure with a title on the left, and what it is of (run, layout, device) below it.

    It is called within `styled`.

    Args:
        height: in inches, as is `width`.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    lines = f"{title}\n{subtitle}" if subtitle else title
    figure.suptitle(lines, x=0.01, ha="left", fontsize=11)
    return figure


def count_axis(axes: Axes, which: str = "x") -> None:
    """Label an axis of counts (steps, tokens, FLOPs) as 250k, 1.5M or 3G, whole numbers where they are small."""
    from matplotlib.ticker import EngFormatter, MaxNLocator

    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_locator(MaxNLocator(nbins=8, integer=True))
    axis.set_major_formatter(EngFormatter(sep=""))


def save(figure: Figure, path: str | Path) -> None:
    """Write a figure into a file, in the format of its suffix; it is called within `styled`.

    Raises:
        ConfigError: the suffix is not one of `SUFFIXES`, or the file cannot be written.
    """
    path = Path(path)
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(
            f"`--output` must end in one of {', '.join(SUFFIXES)}, but is {path.name}; rename it"
        )
    dated = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(path.suffix.lower())
    try:
        figure.savefig(path, metadata=dated)
    except OSError as error:
        raise ConfigError(f"`--output` must be a file that can be written, but: {error}") from error
