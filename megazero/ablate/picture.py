"""The results as a picture: validation loss against tokens, FLOPs and time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from megazero.ablate.results import Findings
from megazero.pictures import new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.typing import ColorType

_PANELS = MappingProxyType({"tokens": "tokens", "flops": "training FLOPs", "seconds": "seconds of training"})
_STYLES = ("-", "--", ":", "-.")
_START = 0.1  # share of the training whose losses would flatten all others


def draw(findings: Sequence[Findings], baseline: str, path: Path) -> None:
    """Draw the curves into a file, in the format of its suffix. Needs matplotlib.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    figure_of(findings, baseline).savefig(path, dpi=120)


def figure_of(findings: Sequence[Findings], baseline: str) -> Figure:
    """The picture that `draw` writes: a line is a member's mean over its seeds, a band their range.

    A file has a colour and a length has a style, so `wide` and `wide@0.5` share their colour. A dashed
    horizontal line is the final loss of `baseline`.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    figure = new_figure(15, 5.5)
    import matplotlib

    panels = figure.subplots(1, len(_PANELS), sharey=True)
    colours = cycle(matplotlib.color_sequences["tab10"])
    files: dict[str, ColorType] = {}
    lengths: dict[str, str] = {}
    for finding in findings:
        if finding.file not in files:
            files[finding.file] = next(colours)
        colour, length = files[finding.file], finding.name.removeprefix(finding.file)
        style = lengths.setdefault(length, _STYLES[len(lengths) % len(_STYLES)])
        for axes, quantity in zip(panels, _PANELS, strict=True):
            _draw_curve(axes, finding, quantity, colour, style)
    for axes, label in zip(panels, _PANELS.values(), strict=True):
        for finding in findings:
            if finding.name == baseline:
                axes.axhline(finding.curve[-1].loss, color="black", linestyle="--", linewidth=0.8)
        axes.set_xlabel(label)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("validation loss (nats per token)")
    panels[0].set_ylim(top=_highest(findings))
    handles, labels = panels[0].get_legend_handles_labels()
    columns = min(8, len(findings)) if len(lengths) < 2 else len(files)
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False)
    return figure


def _draw_curve(axes: Axes, finding: Findings, quantity: str, colour: ColorType, style: str) -> None:
    curve = finding.curve
    spent, losses = [getattr(m, quantity) for m in curve], [m.loss for m in curve]
    axes.plot(
        spent, losses, "o", linestyle=style, color=colour, markersize=3, linewidth=1.2, label=finding.name
    )
    if len(finding.runs) > 1:
        low, high = zip(*finding.band(), strict=True)
        axes.fill_between(spent, low, high, color=colour, alpha=0.2, linewidth=0)


def _highest(findings: Sequence[Findings]) -> float | None:
    """The top of the loss axis, which cuts off the high losses of the start; None for no limit."""
    longest = max(finding.curve[-1].tokens for finding in findings)
    later = [
        high
        for finding in findings
        for milestone, (_, high) in zip(finding.curve, finding.band(), strict=True)
        if milestone.tokens > _START * longest and high == high
    ]
    lowest = min((milestone.loss for finding in findings for milestone in finding.curve), default=0.0)
    if not later or not max(later) > lowest:
        return None
    return max(later) + 0.05 * (max(later) - lowest)
