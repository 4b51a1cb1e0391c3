"""Words on colored areas of a picture."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.typing import ColorType


def write_on(axes: Axes, x: float, y: float, words: str, color: ColorType, points: float) -> None:
    """Write words in the middle of an area, in black or white, whichever stands out from its color."""
    from matplotlib.colors import to_rgb

    parts = zip((0.21, 0.72, 0.07), to_rgb(color), strict=True)
    letters = "black" if sum(weight * part**2.2 for weight, part in parts) > 0.18 else "white"
    area = {"facecolor": color, "edgecolor": "none", "pad": 0}
    axes.text(x, y, words, ha="center", va="center_baseline", fontsize=points, color=letters, bbox=area)
