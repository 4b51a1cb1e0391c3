"""Picture files, drawn by matplotlib, which is an optional dependency."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from megazero.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg", ".pdf")


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of this size, in inches.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "matplotlib must be installed to draw a picture, but is not; run `pip install matplotlib`"
        ) from error
    return Figure(figsize=(width, height), layout="constrained")


def check_suffix(path: Path) -> None:
    """Refuse a file whose format is unknown.

    Raises:
        ConfigError: the suffix is not one of `SUFFIXES`.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(
            f"`--output` must end in one of {', '.join(SUFFIXES)}, but is {path.name}; rename it"
        )
