"""What is asked of every picture: that it can be read, by anybody, on its paper."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.text import Text

from megazero.pictures.style import Theme

_NUMBER = re.compile("[-\N{MINUS SIGN}]?[0-9]")
LEAST_CONTRAST = 3.0
"""Contrast of a mark with its paper (WCAG 2.1, success criterion 1.4.11)."""
COUNTED = (
    *("step", "iteration", "update", "token", "FLOPs", "sample", "rank", "layer", "expert", "entry"),
    *("stage", "device", "position", "chunk", "micro-batch", "seed"),
)
"""What is counted has no unit but its name."""
EYES = {
    "protanopia": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "deuteranopia": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.01182, 0.04294, 0.968881),
    ),
    "all colors": ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)),
}
"""What eyes make of linear red, green and blue (Machado, Oliveira, Fernandes, IEEE TVCG 15(6), 2009)."""


def complaints(figure: Figure, theme: Theme) -> list[str]:
    """Everything that a reader would complain about in a figure that was drawn on this theme's paper."""
    FigureCanvasAgg(figure).draw()
    wrong = [] if figure.get_suptitle() else ["the figure has no title"]
    for number, axes in enumerate(figure.axes):
        wrong += [f"axes {number}: {complaint}" for complaint in _of_axes(axes, theme)]
    return [*wrong, *_of_texts(figure, theme)]


def contrast(one: str, other: str) -> float:
    """The contrast of two colors, from 1 to 21."""
    dark, light = sorted(float(linear(color) @ (0.2126, 0.7152, 0.0722)) for color in (one, other))
    return (light + 0.05) / (dark + 0.05)


def distance(one: str, other: str, eyes: str) -> float:
    """The distance of two colors as these eyes see them: 100 times that in Oklab; 2 can just be seen."""
    a, b = (_oklab(np.array(EYES[eyes]) @ linear(color)) for color in (one, other))
    return 100 * float(np.linalg.norm(a - b))


def linear(color: str) -> np.ndarray:
    """The linear red, green and blue of a color."""
    parts = np.array(to_rgb(color))
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def _oklab(rgb: np.ndarray) -> np.ndarray:
    cones = [[0.41222, 0.53633, 0.05145], [0.2119, 0.6807, 0.1074], [0.0883, 0.28172, 0.62998]]
    axes = [[0.21045, 0.79362, -0.00407], [1.978, -2.42859, 0.45059], [0.0259, 0.78277, -0.80867]]
    return np.array(axes) @ np.cbrt(np.array(cones) @ np.clip(rgb, 0, 1))


def ink(path: Path, paper: str) -> float:
    """The share of a picture's pixels that are not bare paper; an SVG is converted by rsvg-convert.

    Skips the test where there is no such program.
    """
    if path.suffix == ".svg":
        import pytest

        if shutil.which("rsvg-convert") is None:
            pytest.skip("rsvg-convert is not installed")
        picture = path.with_suffix(".converted.png")
        subprocess.run(["rsvg-convert", path, "-o", picture], check=True)
        path = picture
    return float((np.abs(imread(path)[..., :3] - to_rgb(paper)) > 0.02).any(axis=-1).mean())


def _of_axes(axes: Axes, theme: Theme) -> Iterator[str]:
    for name, axis in (("x", axes.xaxis), ("y", axes.yaxis)):
        yield from (f"the {name} axis {complaint}" for complaint in _of_axis(axis))
    written = {text.get_text() for text in axes.findobj(Text) if text.get_visible()}
    legends = [axes.get_legend(), *axes.figure.legends]
    written |= {text.get_text() for legend in legends if legend for text in legend.get_texts()}
    for line in axes.lines:
        name = str(line.get_label()).removeprefix("_")
        if not any(text.startswith(name) for text in written):
            yield f"the line {name} is named nowhere"
        color = to_hex(line.get_color())
        faint = line.get_alpha() not in (None, 1) or color in (theme.faint, theme.grid)
        if not faint and contrast(color, theme.paper) < LEAST_CONTRAST:
            yield f"the line {name} ({color}) does not stand out from the paper"


def _of_axis(axis: Axis) -> Iterator[str]:
    shown = [label.get_text() for label in _tick_labels(axis)]
    if axis.get_offset_text().get_text():
        yield f"has the offset {axis.get_offset_text().get_text()}"
    numbers = any(_NUMBER.match(label) for label in shown)
    label = axis.label.get_text() or _label_of_all(axis)
    if numbers and not ("(" in label or any(word in label for word in COUNTED)):
        yield f"says no unit: {label!r}"
    if len(shown) != len(set(shown)):
        yield f"has the same label twice: {shown}"


def _label_of_all(axis: Axis) -> str:
    """The label of the figure, or of one of the axes that share this axis."""
    across = axis.axis_name == "x"
    shared = axis.axes.get_shared_x_axes() if across else axis.axes.get_shared_y_axes()
    beside = (axes.get_xlabel() if across else axes.get_ylabel() for axes in shared.get_siblings(axis.axes))
    whole = axis.figure.get_supxlabel() if across else axis.figure.get_supylabel()
    return whole or next(filter(None, beside), "")


def _tick_labels(axis: Axis) -> list[Text]:
    low, high = sorted(axis.get_view_interval())
    slack = 1e-9 * (high - low)
    return [
        label
        for place, tick in zip(axis.get_majorticklocs(), axis.get_major_ticks(), strict=False)
        for label in (tick.label1, tick.label2)
        if low - slack <= place <= high + slack
        and label.get_visible()
        and label.get_text()
        and axis.get_visible()
        and axis.axes.axison
        and axis.axes.get_visible()
    ]


def _of_texts(figure: Figure, theme: Theme) -> Iterator[str]:
    """Texts that leave the paper, lie over each other, or do not stand out from it."""
    canvas = FigureCanvasAgg(figure)
    axes = [axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)]
    ticks = {label for axis in axes for label in _all_ticks(axis)}
    shown = {label for axis in axes for label in _tick_labels(axis)}
    texts = [
        text
        for text in figure.findobj(Text)
        if text.get_visible() and text.get_text().strip() and (text not in ticks or text in shown)
    ]
    boxes = [text.get_window_extent(canvas.get_renderer()) for text in texts]
    for text, box in zip(texts, boxes, strict=True):
        if box.x0 < -1 or box.y0 < -1 or box.x1 > figure.bbox.x1 + 1 or box.y1 > figure.bbox.y1 + 1:
            yield f"the text {text.get_text()!r} leaves the paper"
        behind = text.get_bbox_patch()
        paper = to_hex(behind.get_facecolor()) if behind else theme.paper
        if contrast(to_hex(text.get_color()), paper) < LEAST_CONTRAST:
            yield f"the text {text.get_text()!r} does not stand out from the paper"
    for (one, box), (other, second) in combinations(zip(texts, boxes, strict=True), 2):
        wide = min(box.x1, second.x1) - max(box.x0, second.x0)
        high = min(box.y1, second.y1) - max(box.y0, second.y0)
        if wide > 1 and high > 2:
            yield f"the texts {one.get_text()!r} and {other.get_text()!r} lie over each other"


def _all_ticks(axis: Axis) -> Iterator[Text]:
    for tick in (*axis.majorTicks, *axis.minorTicks):
        yield from (tick.label1, tick.label2)
