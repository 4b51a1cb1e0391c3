"""The results as a picture: what each member ends with, and how the few that matter got there."""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING

from megazero.ablate.results import Findings
from megazero.ablate.table import si
from megazero.pictures.style import LIGHT, Theme, count_axis, new_figure, save, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COSTS = (("tokens", "tokens"), ("flops", "training FLOPs"), ("seconds", "time of training steps (s)"))
_START = 0.1  # share of the training whose losses would flatten all others
_CURVES, _ROW, _AROUND = 2.9, 0.21, 0.8  # inches: of the curves, of a file's row, and around the rows
_OTHERS = "others"


def draw(findings: Sequence[Findings], baseline: str, path: Path, study: str, theme: Theme = LIGHT) -> None:
    """Draw the results of a study into a file, in the format of its suffix. Needs matplotlib.

    Raises:
        ConfigError: matplotlib is not installed, or the file cannot be written.
    """
    with styled(theme):
        save(figure_of(findings, baseline, study, theme), path)


def figure_of(findings: Sequence[Findings], baseline: str, study: str, theme: Theme) -> Figure:
    """The picture that `draw` writes; it is called within `styled`.

    Above, a panel for each length of the training has a dot for each file's mean final loss and a bar for its
    range over the seeds, the best first. Below are curves at the baseline's length: that of the baseline, of
    the best and of the worst other file, and the rest in grey. The dashed line is the baseline's final loss.
    """
    lengths = list({finding.length: None for finding in findings})
    goal = next((finding for finding in findings if finding.name == baseline), None)
    lengths.sort(key=lambda length: length != (goal or findings[0]).length)
    ends = {finding.name: finding.curve[-1].loss for finding in findings}
    ranked = sorted(findings, key=lambda f: (lengths.index(f.length), isnan(ends[f.name]), ends[f.name]))
    files = list({finding.file: None for finding in ranked})
    roles = _roles(files, baseline.partition("@")[0], theme)
    title, rows = f"{study}: final loss of {len(files)} configurations", _AROUND + _ROW * len(files)
    figure = new_figure(title, _about(findings), height=rows + _CURVES + _AROUND / 2)
    grid = figure.add_gridspec(2, 1, height_ratios=(rows, _CURVES))
    panels = grid[0].subgridspec(1, len(lengths)).subplots(sharex=True, sharey=True, squeeze=False)[0]
    curves = grid[1].subgridspec(1, len(_COSTS)).subplots(sharey=True, squeeze=False)[0]
    for axes, length in zip(panels, lengths, strict=True):
        _draw_ends(axes, [finding for finding in ranked if finding.length == length], files, roles)
        axes.set_title(f"{length} × the whole training" if length else "whole training")
        axes.locator_params(axis="x", nbins=max(2, 12 // len(lengths)))
    figure.axes[len(lengths) // 2].set_xlabel("final loss (nats per token)")
    shown = [finding for finding in ranked if finding.length == lengths[0]]
    for axes, (cost, label) in zip(curves, _COSTS, strict=True):
        for finding in sorted(shown, key=lambda finding: list(roles).index(finding.file)):
            _draw_curve(axes, finding, cost, *roles[finding.file])
        axes.set_xlabel(label)
        count_axis(axes)
    for mark in (*(axes.axvline for axes in panels), *(axes.axhline for axes in curves)):
        if goal is not None:
            label = f"{baseline} ends at {ends[baseline]:.3f}"
            mark(ends[baseline], color=theme.ink, linestyle="--", linewidth=1, zorder=1.8, label=label)
    curves[0].set_ylabel("validation loss (nats per token)")
    curves[0].set_ylim(top=_highest(shown))
    handles = {label: handle for handle, label in zip(*curves[0].get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=5)
    return figure


def _roles(files: Sequence[str], baseline: str, theme: Theme) -> dict[str, tuple[str, str]]:
    """The color and the name in the legend of each file, of which the best comes first."""
    words = {baseline: "baseline"} if baseline in files else {}
    for file, word in ((files[0], "best"), (files[-1], "worst")) if len(files) > 1 else ():
        words[file] = f"{words[file]}, {word}" if file in words else word
    colors = {"baseline": theme.series[0], "best": theme.series[2], "worst": theme.series[3]}
    roles = {file: (colors[word.split(",")[0]], f"{file} ({word})") for file, word in words.items()}
    return roles | {file: (theme.muted, _OTHERS) for file in files if file not in roles}


def _about(findings: Sequence[Findings]) -> str:
    """What was trained, and what dots and bars are."""
    runs = [run for finding in findings for run in finding.runs]
    sizes = sorted(run.size.parameters for run in runs)
    size = " to ".join(dict.fromkeys((si(sizes[0]), si(sizes[-1]))))
    ranks, seeds = sorted({run.ranks for run in runs}), sorted({run.seed for run in runs})
    tokens = si(max(run.end.tokens for run in runs))
    numbers = [", ".join(map(str, several)) for several in (ranks, seeds)]
    text = f"{size} parameters; {tokens} tokens; ranks: {numbers[0]}; seeds: {numbers[1]}"
    return text + (". Dots and lines are means, bars and bands ranges." if len(seeds) > 1 else "")


def _draw_ends(
    axes: Axes, findings: Sequence[Findings], files: Sequence[str], roles: dict[str, tuple[str, str]]
) -> None:
    """Draw a row for each file, the best above."""
    for finding in findings:
        row, color = files.index(finding.file), roles[finding.file][0]
        axes.hlines(row, *finding.band()[-1], color=color, linewidth=3, alpha=0.45)
        axes.plot(finding.curve[-1].loss, row, "o", color=color, markersize=6, label=f"_{finding.file}")
    axes.set_yticks(range(len(files)), files)
    axes.set_ylim(len(files) - 0.5, -0.5)


def _draw_curve(axes: Axes, finding: Findings, cost: str, color: str, name: str) -> None:
    spent, losses = [getattr(m, cost) for m in finding.curve], [m.loss for m in finding.curve]
    alpha, order = (0.5, 1.9) if name == _OTHERS else (1, 2)
    axes.plot(spent, losses, "o-", color=color, markersize=2.5, label=name, alpha=alpha, zorder=order)
    if len(finding.runs) > 1 and name != _OTHERS:
        low, high = zip(*finding.band(), strict=True)
        axes.fill_between(spent, low, high, color=color, alpha=0.15, linewidth=0)


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
    top = max(later, default=lowest)
    return top + 0.05 * (top - lowest) if top > lowest else None
