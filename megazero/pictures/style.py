"""One style for all pictures: sizes, colors, fonts, titles, units and files, on light and dark paper."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING

from megazero.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg", ".pdf")
WIDTH = 9.0
"""The width of a picture in inches: that of a page, at 100 dots per inch."""
_TITLE, _SMALL = 11, 8.5  # sizes of letters in points
_LINE = 1.35 / 72  # inches of a line for each point of its letters
_LETTER = 0.56 / 72  # inches of a letter, on average, for each point of its size; bold ones are wider
_EDGE = 0.1  # inches between the title and the edge of the paper


@dataclass(frozen=True)
class Theme:
    """The colors of a picture.

    Attributes:
        paper: the background.
        ink: text and axes.
        muted: text and lines that matter less.
        faint: what is there for comparison alone.
        grid: lines of the grid, and empty areas.
        series: the colors of series, in order, for lines, dots and areas. They stand out from the paper, and
            people who see no red or no green tell them apart by their lightness.
    """

    name: str
    paper: str
    ink: str
    muted: str
    faint: str
    grid: str
    series: tuple[str, ...]


LIGHT = Theme(
    "light",
    paper="#ffffff",
    ink="#1c2026",
    muted="#646c76",
    faint="#b4bac2",
    grid="#e3e6ea",
    series=("#0060b0", "#d67f00", "#007d5e", "#a93200", "#d066a8", "#2b96d4", "#3d2a66"),
)
DARK = Theme(
    "dark",
    paper="#16191f",
    ink="#e8eaed",
    muted="#9aa2ad",
    faint="#565e69",
    grid="#2d323a",
    series=("#4f9fee", "#f2b53c", "#19a37a", "#e0582e", "#f0a8d2", "#b9e6fb", "#8560a0"),
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
        from matplotlib import RcParams, rc_context
    except ImportError as error:
        raise ConfigError(
            "matplotlib must be installed to draw a picture, but is not; run `pip install matplotlib`"
        ) from error
    colors = {
        **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), theme.paper),
        **dict.fromkeys(("text.color", "axes.labelcolor", "axes.titlecolor", "hatch.color"), theme.ink),
        **dict.fromkeys(("xtick.color", "ytick.color", "axes.edgecolor"), theme.muted),
        "grid.color": theme.grid,
        "axes.prop_cycle": cycler(color=theme.series),
    }
    shapes = {
        "font.family": ["DejaVu Sans", "sans-serif"],
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
        "grid.linewidth": 0.7,
        "image.cmap": "cividis",
        "lines.linewidth": 1.4,
        "legend.frameon": False,
        "legend.fontsize": _SMALL,
        "svg.fonttype": "none",  # text stays text
        "svg.hashsalt": "megazero",  # the same picture gives the same bytes
        "savefig.dpi": 150,
    }
    with rc_context(RcParams({**colors, **shapes})):
        yield


def new_figure(title: str, subtitle: str = "", *, height: float = 5.0, width: float = WIDTH) -> Figure:
    """Make an empty figure with a title on the left, and what it is of (run, layout, device) below it.

    It is called within `styled`. Lines that are longer than the figure is wide are folded.

    Args:
        height: in inches, as is `width`.
    """
    from matplotlib import rcParams
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    heading, below = _folded(title, width, _TITLE * 1.1), _folded(subtitle, width, _SMALL)
    x, top = _EDGE / width, 1 - 0.8 * _EDGE / height
    middle = top - len(heading.splitlines()) * _TITLE * _LINE / height
    bottom = middle - len(below.splitlines()) * _SMALL * _LINE / height - 0.5 * _EDGE / height
    figure = Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(rect=(0, 0, 1, bottom)))
    texts = [figure.suptitle(heading, x=x, y=top, ha="left", va="top", fontsize=_TITLE, fontweight="bold")]
    muted = rcParams["xtick.color"]
    texts += [figure.text(x, middle, below, va="top", fontsize=_SMALL, color=muted, gid="subtitle")]
    for text in texts:
        text.set_in_layout(False)
    return figure


def _folded(text: str, width: float, points: float) -> str:
    letters = max(1, int((width - 2 * _EDGE) / (points * _LETTER)))
    return "\n".join(line for part in text.splitlines() for line in wrap(part, letters))


def count_axis(axes: Axes, which: str = "x", unit: str = "") -> None:
    """Label an axis of counts (steps, tokens, FLOPs) as 250k, 1.5M or 3G, or 3 GB with ``B`` as the unit.

    Ticks are at whole numbers, or at powers of ten where the axis is logarithmic.
    """
    from matplotlib.ticker import EngFormatter, MaxNLocator, NullFormatter

    axis = axes.xaxis if which == "x" else axes.yaxis
    if axis.get_scale() == "linear":
        axis.set_major_locator(MaxNLocator(nbins=7, integer=True, steps=[1, 2, 2.5, 5, 10]))
    axis.set_major_formatter(EngFormatter(unit, sep=" " if unit else ""))
    axis.set_minor_formatter(NullFormatter())


def name_level(axes: Axes, height: float, name: str) -> None:
    """Draw a dashed line across the axes at a height (a limit, a goal), and its name at its right end."""
    from matplotlib import rcParams
    from matplotlib.patheffects import withStroke

    muted, across = rcParams["xtick.color"], axes.get_yaxis_transform()
    axes.axhline(height, color=muted, linestyle=(0, (5, 3)), linewidth=1, label=f"_{name}")
    text = axes.annotate(name, (1, height), (-2, 3), xycoords=across, textcoords="offset points", ha="right")
    halo = [withStroke(linewidth=3, foreground=rcParams["axes.facecolor"])]
    text.set(fontsize=_SMALL, color=muted, path_effects=halo)


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
