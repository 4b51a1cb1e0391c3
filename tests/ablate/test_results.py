"""From metrics to numbers, table, lines and picture."""

from __future__ import annotations

import json
import math

import pytest

from megazero.ablate.picture import draw, figure_of
from megazero.ablate.progress import ProgressTable
from megazero.ablate.results import (
    EvaluationPoint,
    Findings,
    RunResult,
    grouped,
    reaching,
    result_of,
    write_lines,
)
from megazero.ablate.runs import run_all
from megazero.ablate.sizes import ModelSize, size_of, used
from megazero.ablate.study import StudyOptions, read_study
from megazero.ablate.table import duration, markdown, si
from megazero.ablate.trial import trials_of
from megazero.mpu.param_spec import Cut, InitialValues, ParamSpec
from megazero.pictures import style
from tests.ablate.samples import quick_trainer, write_study
from tests.tables import over_table

SIZE = ModelSize(23_100_000, 12_340_000, 6.2e7)


def outcome(
    name: str, losses: list[float], *, seed: int = 1, cost: float = 1.0, title: str = ""
) -> RunResult:
    """A run that is evaluated every 100 steps of 1000 tokens, 2e9 x `cost` FLOPs and 0.1 x `cost` s each."""
    curve = tuple(
        EvaluationPoint(100 * i, 1e5 * i, 2e11 * i * cost, 10.0 * i * cost, loss)
        for i, loss in enumerate(losses, 1)
    )
    return RunResult(name, title, seed, 1, "0123abcd", SIZE, curve)


def test_what_was_spent_is_summed_up_to_each_evaluation(tmp_path):
    members = read_study(write_study(tmp_path / "s", a=""), StudyOptions()).members
    (trial,) = trials_of(members, 1, 1, tmp_path)
    with ProgressTable([trial]) as board:
        assert run_all([trial], board, quick_trainer(tmp_path)) == []
    found = result_of(trial, SIZE)
    assert [(m.iteration, m.tokens, m.flops, m.seconds) for m in found.curve] == [
        (2, 32, 2e12, 1.0),  # two steps of half a second at 2 TFLOP/s
        (4, 64, 4e12, 2.0),
    ]
    assert [m.loss for m in found.curve] == pytest.approx([2.1334, 0.1334])
    assert (found.configuration, found.seed, found.fingerprint) == ("a", 1234, trial.fingerprint)


def test_sizes_are_those_of_the_layers(tmp_path):
    """h = 8, one layer, 259 entries of the vocabulary, 8 positions, everything with biases and norms."""
    write_study(tmp_path / "s", a="", wide="model: {ffn_hidden_size: 100}")
    plain, wide = (size_of(member.config) for member in read_study(tmp_path / "s", StudyOptions()).members)
    vocabulary = size_of_vocabulary(tmp_path)
    attention, mlp, norms = 4 * 8 * 8 + 4 * 8, 2 * 8 * 32 + 32 + 8, 3 * 2 * 8
    assert plain.parameters == (vocabulary + 8) * 8 + attention + mlp + norms
    assert plain.active_parameters == plain.parameters
    assert wide.parameters - plain.parameters == (100 - 32) * (2 * 8 + 1)
    assert wide.flops_per_token - plain.flops_per_token == 3 * 2 * 2 * 8 * (100 - 32)


@over_table(
    ("shape", "cuts", "active"),
    [
        ((8, 32, 16), (Cut(0, "ep"), Cut(1, "etp")), 2 * 32 * 16),
        ((2, 8, 4), (Cut(1, "ep"),), 2 * 2 * 4),  # experts may be any dim
        ((1, 32), (Cut(0, "ep"),), 32),
        ((8, 32), (Cut(0, "tp"),), 8 * 32),  # not of experts
        ((7,), (), 7),
    ],
)
def test_a_token_uses_its_share_of_stacked_experts(shape, cuts, active):
    assert used(ParamSpec("w", shape, InitialValues("zeros"), cuts), 2) == active


def size_of_vocabulary(folder) -> int:
    from megazero.train.parts.vocabulary import build_vocabulary

    return build_vocabulary(read_study(folder / "s", StudyOptions()).members[0].config).size


def test_runs_are_grouped_by_member():
    two = grouped([outcome("b", [3.0], seed=2), outcome("a", [1.0]), outcome("b", [5.0], seed=1)])
    assert [found.name for found in two] == ["b", "a"]
    assert two[0].losses == [5.0, 3.0]
    assert two[0].curve[-1].loss == 4.0
    assert two[0].spread == pytest.approx(math.sqrt(2))
    assert two[1].spread is None
    assert two[0].band() == [(3.0, 5.0)]


@over_table(
    ("losses", "flops"),
    [
        ([8.0, 6.0, 4.0], 4e11),  # on an evaluation
        ([8.0, 7.0, 3.0], 4.5e11),  # a quarter of the way from the second to the third
        ([8.0, 5.0, 9.0, 6.0], 8e11),  # not for good at first
        ([5.0, 4.0], 2e11),  # below from the first evaluation on
        ([8.0, 6.1], None),
        ([8.0, math.nan, 5.0], 6e11),
        ([8.0, 5.0, math.nan], None),
    ],
)
def test_where_a_curve_reaches_a_loss_for_good(losses, flops):
    there = reaching(outcome("a", losses).curve, 6.0)
    assert (None if there is None else there.flops) == (None if flops is None else pytest.approx(flops))


def test_the_table():
    outcomes = [
        *(outcome("dense", [7.0, end], seed=seed, title="As it was") for seed, end in ((1, 5.9), (2, 6.1))),
        *(outcome("wide", [6.5, 5.5], seed=seed, cost=1.2, title="Wider") for seed in (1, 2)),
        *(outcome("thin", [7.5, 6.5], seed=seed, cost=0.5) for seed in (1, 2)),
    ]
    assert markdown(grouped(outcomes), "dense") == (
        "| configuration | validation loss | parameters | active | tokens | training FLOPs | time "
        "| FLOPs to reach dense | time to reach dense |\n"
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|\n"
        "| dense | 6.0000 ± 0.1414 | 23.1 M | 12.3 M | 200 k | 400 G | 20.0 s | 1 | 1 |\n"
        "| wide | 5.5000 ± 0.0000 | 23.1 M | 12.3 M | 200 k | 480 G | 24.0 s | 0.90 | 0.90 |\n"
        "| thin | 6.5000 ± 0.0000 | 23.1 M | 12.3 M | 200 k | 200 G | 10.0 s | not reached | not reached |\n"
        "\n"
        "Seeds 1, 2; ranks: 1. The loss is in nats per token, ± is its standard deviation over the seeds;\n"
        "active parameters are those that one token uses; time is that of the training steps alone.\n"
        "The last two columns are the shares of the FLOPs and of the time of dense after which\n"
        "the mean loss is for good no higher than that which dense ends with.\n"
        "\n"
        "- `dense`: As it was\n"
        "- `wide`: Wider\n"
    )


def test_a_table_of_one_seed_without_its_baseline():
    assert markdown(grouped([outcome("a", [7.0, 6.0])]), "dense") == (
        "| configuration | validation loss | parameters | active | tokens | training FLOPs | time |\n"
        "|---|---:|---:|---:|---:|---:|---:|\n"
        "| a | 6.0000 | 23.1 M | 12.3 M | 200 k | 400 G | 20.0 s |\n"
        "\n"
        "Seed 1; ranks: 1. The loss is in nats per token;\n"
        "active parameters are those that one token uses; time is that of the training steps alone.\n"
    )


@over_table(
    ("number", "text"),
    [
        (0, "0"),
        (999, "999"),
        (999.6, "1.00 k"),
        (1234, "1.23 k"),
        (9996, "10.0 k"),
        (99_960, "100 k"),
        (345e6, "345 M"),
        (6.02e23, "602 Z"),
        (math.inf, "inf"),
    ],
)
def test_numbers_have_three_digits(number, text):
    assert si(number) == text


def test_times_have_three_digits():
    assert [duration(x) for x in (0.0, 1.254, 9.996, 99.96, 5400.4)] == [
        *("0.00 s", "1.25 s", "10.0 s", "100 s", "5,400 s")
    ]


def test_a_line_per_run_reads_back(tmp_path):
    write_lines([outcome("a", [7.0, math.nan], title="T"), outcome("b", [6.0])], tmp_path / "r.jsonl")
    first, second = map(json.loads, (tmp_path / "r.jsonl").read_text().splitlines())
    assert {key: value for key, value in first.items() if key != "curve"} == {
        "configuration": "a",
        "title": "T",
        "seed": 1,
        "ranks": 1,
        "fingerprint": "0123abcd",
        "parameters": 23_100_000,
        "active_parameters": 12_340_000,
        "flops_per_token": 6.2e7,
        "validation_loss": "NaN",
        "tokens": 2e5,
        "flops": 4e11,
        "seconds": 20.0,
    }
    assert second["curve"] == [{"iteration": 100, "tokens": 1e5, "flops": 2e11, "seconds": 10.0, "loss": 6.0}]


def study(*names: str, seeds: int = 2) -> tuple[Findings, ...]:
    """Members of which each ends with a loss that is 0.5 higher than that of the one before."""
    return grouped(
        outcome(name, [9.0 + n / 2, 7.0 + n / 2, 6.0 + n / 2 + seed / 10], seed=seed)
        for n, name in enumerate(names)
        for seed in range(seeds)
    )


@pytest.mark.parametrize(
    ("names", "theme"),
    [
        (("dense", "wide", "thin", "deep"), style.LIGHT),
        (tuple(f"{name}{at}" for at in ("", "@0.67", "@0.5") for name in ("dense", "wide")), style.DARK),
    ],
)
def test_a_study_is_drawn_so_that_it_can_be_read(names, theme, tmp_path):
    pytest.importorskip("matplotlib")
    from tests.pictures.checks import complaints, ink

    with style.styled(theme):
        figure = figure_of(study(*names), "dense", "A study", theme)
        assert complaints(figure, theme) == []
    draw(study(*names), "dense", tmp_path / "a.png", "A study", theme)
    assert 0.02 < ink(tmp_path / "a.png", theme.paper) < 0.3


def test_a_study_has_a_dot_per_member_and_curves_of_the_few_that_matter():
    pytest.importorskip("matplotlib")
    with style.styled():
        figure = figure_of(study("dense", "wide", "thin", "deep"), "wide", "A study", style.LIGHT)
    ends, tokens, flops, _ = figure.axes
    assert [label.get_text() for label in ends.get_yticklabels()] == ["dense", "wide", "thin", "deep"]
    dots = {line.get_label(): list(line.get_xdata()) for line in ends.lines}
    assert dots["_dense"] == [pytest.approx(6.05)]
    assert dots["wide ends at 6.550"] == [pytest.approx(6.55)] * 2
    bars = [segments.tolist() for bar in ends.collections for segments in bar.get_segments()]
    assert bars[0] == [[6.0, 0.0], [pytest.approx(6.1), 0.0]]
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == ["wide (baseline)", "dense (best)", "deep (worst)", "others", "wide ends at 6.550"]
    assert [list(line.get_xdata()) for line in flops.lines[:1]] == [[2e11, 4e11, 6e11]]
    assert len(tokens.collections) == 3  # bands; the rest has none


def test_a_study_of_several_lengths_has_a_panel_for_each_and_curves_of_the_whole():
    pytest.importorskip("matplotlib")
    with style.styled():
        figure = figure_of(study("a@0.5", "b@0.5", "a", "b"), "a", "A study", style.LIGHT)
    titles = ["whole training", "0.5 × the whole training"]
    assert [axes.get_title(loc="left") for axes in figure.axes] == [*titles, "", "", ""]
    assert [line.get_label() for line in figure.axes[2].lines] == [
        "a (baseline, best)",
        "b (worst)",
        "a ends at 7.050",
    ]


def test_a_picture_of_one_evaluation_or_of_none_that_counted():
    pytest.importorskip("matplotlib")
    with style.styled():
        for losses in ([5.0], [math.nan], [5.0, 5.0]):
            figure = figure_of((Findings((outcome("a", losses),)),), "a", "A study", style.LIGHT)
            assert len(figure.axes) == 4
