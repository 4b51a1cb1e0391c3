"""The one style of pictures: colors for all eyes, titles that fit, counts that can be read."""

from __future__ import annotations

import sys
from itertools import combinations
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from megazero.errors import ConfigError
from megazero.pictures import style
from megazero.pictures.style import DARK, LIGHT, Theme, count_axis, new_figure, styled
from tests.pictures.checks import EYES, complaints, contrast, distance, ink

THEMES = pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])


@pytest.mark.fast
@THEMES
def test_colors_stand_out_and_can_be_told_apart_by_all_eyes(theme: Theme) -> None:
    assert [color for color in theme.series if contrast(color, theme.paper) < 3] == []
    assert contrast(theme.ink, theme.paper) > 10
    assert contrast(theme.muted, theme.paper) > 4.5
    near = [
        (one, other, eyes, round(distance(one, other, eyes), 1))
        for eyes in EYES
        for one, other in combinations(theme.series, 2)
        if distance(one, other, eyes) < 8
    ]
    assert near == []


def test_contrast_and_distance_have_their_known_values() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)
    assert distance("#000000", "#ffffff", "all colors") == pytest.approx(100, abs=0.1)
    red, olive = "#bb0000", "#566400"
    assert distance(red, olive, "deuteranopia") < 6 < 20 < distance(red, olive, "all colors")


def plot(theme: Theme, title: str = "A run") -> style.Figure:
    figure = new_figure(title, "GPT of 4 layers; 2 ranks " * 8, height=4)
    axes = figure.subplots()
    axes.plot([0, 2e6], [3.0, 1.0], label="loss")
    axes.set(xlabel="tokens", ylabel="loss (nats per token)")
    count_axis(axes)
    style.name_level(axes, 2.5, "goal")
    axes.legend()
    return figure


@pytest.mark.parametrize(("theme", "suffix"), [(LIGHT, ".png"), (DARK, ".svg")])
def test_a_picture_has_nothing_to_complain_about(theme: Theme, suffix: str, tmp_path: Path) -> None:
    with styled(theme):
        figure = plot(theme, "What a long name this run has " * 6)
        assert complaints(figure, theme) == []
        style.save(figure, tmp_path / f"a{suffix}")
    assert 0.01 < ink(tmp_path / f"a{suffix}", theme.paper) < 0.3


def test_what_is_wrong_is_said() -> None:
    with styled(DARK):
        figure = new_figure("")
        axes = figure.subplots()
        axes.plot([0, 1], [1e7, 2e7], color="#333333")
        axes.set_xlabel("x")
        axes.text(0.5, 0.5, "one", transform=axes.transAxes)
        axes.text(0.5, 0.5, "two", transform=axes.transAxes)
        figure.text(0.9, 0.01, "a text that is longer than the paper")
        assert complaints(figure, DARK) == [
            "the figure has no title",
            "axes 0: the x axis says no unit: 'x'",
            "axes 0: the y axis has the offset 1e7",
            "axes 0: the y axis says no unit: ''",
            "axes 0: the line child0 is named nowhere",
            "axes 0: the line child0 (#333333) does not stand out from the paper",
            "the text 'a text that is longer than the paper' leaves the paper",
            "the texts 'one' and 'two' lie over each other",
        ]


@pytest.mark.parametrize(
    ("scale", "high", "shown"),
    [
        ("linear", 4, ["0", "1", "2", "3", "4"]),
        ("linear", 1e6, ["0", "200k", "400k", "600k", "800k", "1M"]),
        ("linear", 3e12, ["0", "500G", "1T", "1.5T", "2T", "2.5T", "3T"]),
        ("log", 1e6, ["1", "10", "100", "1k", "10k", "100k", "1M"]),
    ],
)
def test_counts_are_whole_and_short(scale: str, high: float, shown: list[str]) -> None:
    with styled():
        axes = new_figure("A").subplots()
        axes.set(xscale=scale, xlim=(0 if scale == "linear" else 1, high))
        count_axis(axes)
        ticks = [place for place in axes.get_xticks() if axes.get_xlim()[0] <= place <= high]
        assert axes.xaxis.get_major_formatter().format_ticks(ticks) == shown


def test_the_same_picture_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a.svg", "b.svg"):
        with styled():
            style.save(plot(LIGHT), tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_what_cannot_be_drawn_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with styled():
        figure = new_figure("A")
        with pytest.raises(ConfigError, match="must end in one of .png, .svg, .pdf, but is a.gif"):
            style.save(figure, tmp_path / "a.gif")
        with pytest.raises(ConfigError, match="must be a file that can be written"):
            style.save(figure, tmp_path / "absent" / "a.png")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match="run `pip install matplotlib`"), styled():
        pass
