"""Words on colored areas of a picture."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.typing import ColorType

_MIDDLE = 0.18  # the luminance on which black and white stand out alike


def write_on(axes: Axes, place: tuple[float, float], words: str, color: ColorType, points: float) -> None:
    """Write words in the middle of an area, in black or white, whichever stands out from its color.

    Args:
        place: the middle, in data coordinates.
        points: the size of the letters.
    """
    from matplotlib.colors import to_rgb

    luminance = sum(
        weight * (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4)
        for weight, part in zip((0.2126, 0.7152, 0.0722), to_rgb(color), strict=True)
    )
    axes.text(
        *place,
        words,
        ha="center",
        va="center_baseline",
        fontsize=points,
        color="black" if luminance > _MIDDLE else "white",
        bbox={"facecolor": color, "edgecolor": "none", "pad": 0},
    )
