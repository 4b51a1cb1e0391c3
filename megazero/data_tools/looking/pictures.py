"""Pictures of a plan and of datasets, from the facts that the tools print as JSON."""

from __future__ import annotations

from itertools import dropwhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megazero.pictures.style import count_axis, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from megazero.pictures.style import Theme


def first_repeat(row: dict[str, Any]) -> str:
    """The first repeat of a source of a plan, in words."""
    if row["first_repeat"] is None:
        return "never"
    step, mark = row["first_repeat_step"], "" if row["exact"] else "~ "
    return mark + (f"sample {row['first_repeat']:,}" if step is None else f"step {step:,}")


def never_seen(row: dict[str, Any]) -> str:
    """The text of a source of a plan that is never seen, in words."""
    tokens, texts, all_tokens = row["unseen_tokens"], row["unseen_sequences"], row["tokens"]
    words = f"{tokens / all_tokens:.1%} of tokens" if tokens >= all_tokens / 1000 else f"{tokens:,} tokens"
    words += f", {texts:,} of {row['sequences']:,} texts" if texts else ""
    return ("" if row["exact"] else "~ ") + words if tokens else "nothing"


def plan_figure(facts: dict[str, Any], theme: Theme) -> Figure:
    """Draw the epochs of each source, those after the first in another color; called within `styled`."""
    rows = facts["sources"]
    names = [f"{Path(row['prefix']).name}\n{row['realized']:.2%} of samples" for row in rows]
    about = f"{facts['samples']:,} samples of {facts['seq_length']:,} tokens"
    figure = new_figure(f"Epochs of {len(rows)} sources", about, height=1.6 + 0.5 * len(rows))
    axes = figure.subplots()
    once = [min(1.0, row["epochs"]) for row in rows]
    axes.barh(range(len(rows)), once, color=theme.series[0], label="first time")
    again = [max(0.0, row["epochs"] - 1) for row in rows]
    axes.barh(range(len(rows)), again, left=once, color=theme.series[1], label="again")
    for place, row in enumerate(rows):
        words = f"first repeat: {first_repeat(row)}\nnever seen: {never_seen(row)}"
        axes.annotate(
            words, (row["epochs"], place), (4, 0), textcoords="offset points", va="center", fontsize=8
        )
    axes.set(yticks=range(len(rows)), yticklabels=names, xlabel="epochs (tokens taken by tokens there)")
    axes.set_xlim(0, 1.45 * max(1.0, *(row["epochs"] for row in rows)))
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    figure.legend(loc="outside lower right", ncols=2)
    return figure


def stats_figure(facts: dict[str, Any], theme: Theme) -> Figure:
    """Draw the lengths of documents, and the share of tokens, of each source; called within `styled`."""
    rows = facts["sources"]
    about = f"{facts['documents']:,} documents, {facts['tokens']:,} tokens"
    figure = new_figure(
        f"Lengths and shares of {len(rows)} datasets", about, height=max(4.0, 1.6 + 0.3 * len(rows))
    )
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    for number, row in enumerate(rows):
        color = theme.series[number % len(theme.series)]
        bins = list(dropwhile(lambda bin: not bin[2], row["histogram"][1:]))
        if bins:
            shares = [100 * count / row["documents"] for _, _, count in bins]
            left.stairs(
                shares, [*(first for first, _, _ in bins), bins[-1][1] + 1], color=color, linewidth=1.4
            )
        right.barh(number, 100 * row["share"], color=color)
        words = f"{row['share']:.1%}"
        right.annotate(words, (100 * row["share"], number), (3, 0), textcoords="offset points", va="center")
    left.set(xscale="log", xlabel="length (tokens)", ylabel="documents (%)")
    count_axis(left, "x")
    right.set(yticks=range(len(rows)), yticklabels=[Path(row["prefix"]).name for row in rows])
    right.set(xlabel="share of tokens (%)", xlim=(0, 1.2 * max(100 * row["share"] for row in rows) or 1))
    right.invert_yaxis()
    right.grid(visible=False, axis="y")
    return figure
