"""Pictures of schedules and plans: folded to the page, with collectives and the update, on any paper."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megazero.errors import ConfigError
from megazero.pipeline.lower import lower
from megazero.pipeline.schedules import gpipe, interleaved, one_f_one_b, zb_h1, zb_v
from megazero.pipeline.simulate import Costs, Timeline, simulate
from megazero.plan.stage import UPDATE
from tests.tables import over_table

pytest.importorskip("matplotlib")

from megazero.account.profilers.memory_picture import draw_memory
from megazero.commands.plan.pictures import DrawnStep, drawn_schedule, held_over_step, step_figure
from megazero.pictures.style import DARK, LIGHT, new_figure, save, styled
from tests.pictures.checks import complaints, ink

LONG = simulate(interleaved(16, 192, 2))


def drawn(timeline: Timeline, theme=LIGHT):
    with styled(theme):
        return step_figure(drawn_schedule(timeline, 1.0), theme)


def corners(panel) -> list[tuple[float, float, float, float]]:
    """(begin, end, top, bottom) of a row's boxes."""
    boxes = [path.get_extents() for collection in panel.collections for path in collection.get_paths()]
    return [(box.x0, box.x1, box.y0, box.y1) for box in boxes]


@pytest.mark.parametrize("schedule", [one_f_one_b(3, 4), interleaved(2, 4, 3), zb_h1(2, 3), zb_v(2, 3)])
def test_a_short_step_is_one_row_with_a_numbered_box_for_each_action(schedule):
    timeline = simulate(schedule)
    figure = drawn(timeline)
    (axes,) = figure.axes
    boxes = sorted((round((y0 + y1) / 2), x0, x1) for x0, x1, y0, y1 in corners(axes))
    spans = [(stage, s.start, s.end) for stage, row in enumerate(timeline.spans) for s in row]
    assert boxes == [pytest.approx(span) for span in sorted(spans)]
    assert axes.get_xlim() == (0.0, timeline.makespan)
    assert axes.get_ylim() == (schedule.stages - 0.5, -0.5)  # whole lanes, the first stage on top
    numbers = [text.get_text() for text in axes.texts]
    assert numbers == [str(s.action.microbatch) for row in timeline.spans for s in row]
    ops = {s.action.op for row in timeline.spans for s in row}
    assert (
        len({tuple(color) for color in axes.collections[0].get_facecolor()})
        == len(ops) * schedule.chunks_per_stage
    )
    assert axes.get_xlabel() == "time (one forward of a stage is 1)"


def test_a_longer_step_is_folded_like_lines_of_text():
    """64 forwards of 1 and 64 backwards of 2 on one stage: 192 units, of which a row has room for 53."""
    figure = drawn(simulate(one_f_one_b(1, 64)))
    assert [axes.get_xlim() for axes in figure.axes] == [
        pytest.approx((row * 192 / 4, (row + 1) * 192 / 4)) for row in range(4)
    ]
    assert [text.get_text() for text in figure.axes[3].texts][-2:] == ["63", "63"]
    drawn_time = sum(x1 - x0 for axes in figure.axes for x0, x1, _, _ in corners(axes))
    assert drawn_time == pytest.approx(192)
    assert figure.get_figwidth() == 9


def test_a_step_with_thousands_of_actions_shows_its_two_ends():
    figure = drawn(LONG)
    first, second, gap, last = figure.axes
    end = LONG.makespan
    assert first.get_xlim()[0] == 0
    assert second.get_xlim()[0] == pytest.approx(first.get_xlim()[1])
    assert last.get_xlim()[1] == pytest.approx(end)
    assert gap.texts[0].get_text() == "⋯  the middle of the step, from 145.8 to 525.6, is not drawn  ⋯"
    assert not first.texts  # no box has room for a number
    assert (figure.get_figwidth(), figure.get_figheight() < 11) == (9, True)


def test_the_collectives_and_the_update_are_drawn():
    program = lower(one_f_one_b(1, 1), gather=True, reduce_every_microbatch=False)
    timeline = simulate(program, Costs(gather=2, reduce=3))
    with styled():
        figure = step_figure(DrawnStep(timeline, "a step", "", "ms", 1e3, update=2.0), LIGHT)
    (axes,) = figure.axes
    boxes = [(x0, x1) for x0, x1, _, _ in corners(axes)]
    assert boxes == [(2000, 3000), (3000, 5000), (0, 2000), (3000, 6000), (6000, 8000)]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        *("forward", "backward", "gather", "reduce", "update", "idle")
    ]
    assert axes.get_xlabel() == "time (ms)"


@over_table("theme", [LIGHT, DARK])
def test_nobody_complains(theme, tmp_path):
    program = lower(zb_v(2, 3), gather=False, reduce_every_microbatch=True)
    for number, timeline in enumerate((simulate(program, Costs(reduce=0.3)), simulate(gpipe(2, 4)))):
        figure = drawn(timeline, theme)
        with styled(theme):
            rows = len(figure.axes) - 1  # the last row names the unit of all
            unnamed = [f"axes {row}: the x axis says no unit: ''" for row in range(rows)]
            assert set(complaints(figure, theme)) <= set(unnamed)
            save(figure, tmp_path / f"{number}.svg")
        assert ink(tmp_path / f"{number}.svg", theme.paper) > 0.2


STAGE = SimpleNamespace(
    stage=0,
    timeline=[("F0.0", 300 << 20, 200 << 20), ("B0.0", 500 << 20, 0), (UPDATE, 100 << 20, 0)],
    trace=SimpleNamespace(resting={"device": {"weights": 600 << 20, "buffers": 80 << 20}}, buffers=80 << 20),
)
TIMES = SimpleNamespace(timeline=simulate(one_f_one_b(1, 1), Costs(0.1, 0.2)), seconds=0.4)


def test_the_memory_of_a_plan_over_a_step():
    """What buffers take is in what operators make, and so is not counted twice."""
    held = held_over_step(STAGE, TIMES)
    assert [sum(alive.values()) >> 20 for alive in held.alive] == [600, 900, 800, 1100, 600, 700, 600]
    assert held.times == pytest.approx([0, 0, 0.1, 0.1, 0.3, 0.3, 0.4])
    assert held.kinds == ["weights", "activations"]
    assert held.doing(held.times[held.peak()]) == "backward of micro-batch 0"


@over_table(
    ("room", "highest", "words"),
    [
        (4 << 30, 5.0, "▼ 1.1 GiB at 100 ms, backward of micro-batch 0"),
        (40 << 30, 1.203125, "▼ 1.1 GiB at 100 ms, backward of micro-batch 0; room of the device: 40 GiB ↑"),
    ],
)
def test_the_room_of_the_device_is_a_named_line_or_far_above(room, highest, words):
    with styled(DARK):
        figure = new_figure("memory")
        panel = figure.subplots()
        draw_memory([panel], [held_over_step(STAGE, TIMES)], room, DARK)
        assert complaints(figure, DARK) == []
    assert panel.get_title(loc="right") == words
    assert panel.get_ylim() == (0, pytest.approx(highest))
    assert [text.get_text() for text in panel.texts] == ["room of the device: 4 GiB"][: int(room == 4 << 30)]


@pytest.mark.parametrize(("suffix", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("PDF", b"%PDF")])
def test_picture_is_written_in_the_format_of_its_suffix(tmp_path, suffix, start):
    path = tmp_path / f"timeline.{suffix}"
    with styled():
        save(drawn(simulate(one_f_one_b(2, 2))), path)
    assert path.read_bytes().startswith(start)


def test_other_suffixes_are_refused(tmp_path):
    with styled(), pytest.raises(ConfigError, match=r"end in one of .png, .svg, .pdf, but is timeline.gif"):
        save(drawn(simulate(one_f_one_b(2, 2))), tmp_path / "timeline.gif")
