"""Published rows: loaded only if they multiply out, and planned within bounds; laws of the plan of a row."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from benchmarks.plan_rows import PAGE, TABLES, errors, plan, sweep, tables, tau
from benchmarks.published.flops import Rate
from benchmarks.published.rows import FOLDER, Row, all_rows, read
from benchmarks.published.step import Step
from megazero.errors import ConfigError, DataError
from megazero.pipeline.schedules import build_schedule
from megazero.pipeline.simulate import Costs, simulate
from tests.tables import over_table


@pytest.fixture(scope="module")
def rows() -> dict[str, Row]:
    return {row.name: row for row in all_rows()}


@pytest.fixture(scope="module")
def planned():
    return plan()


def changed(row: Row, **sizes: object) -> Row:
    """The row with other sizes, in whatever part has them."""
    for part in ("layout", "software", "shape"):
        mine = {key: value for key, value in sizes.items() if hasattr(getattr(row, part), key)}
        row = replace(row, **{part: replace(getattr(row, part), **mine)})
    return row


# Rows.


def test_there_are_enough_rows_and_names_are_their_own(rows):
    assert len(rows) == len(all_rows()) == 166
    assert sum(row.judged for row in rows.values()) == 137


def test_what_is_printed_and_does_not_multiply_out_is_refused():
    with pytest.raises(DataError) as error:
        read(FOLDER / "refused/rows.json")
    assert str(error.value).splitlines() == [
        "rows.json: 405B, C 16: data is printed as 4, but must be 8",
        "rows.json: 70B, fp8: microbatches is printed as 4, but must be 128",
        "rows.json: 70B, 26.04: tflop_per_s is printed as 731, but must be 747.5",
    ]


@over_table(
    ("change", "says"),
    [
        ({"tensor": 3}, "must divide 32 GPUs"),
        ({"global_batch": 1000}, "m x b x D must be 1000 sequences"),
        ({"recompute": "half"}, "`half` must be one of none, selective, full"),
        ({"count": "mfu"}, "`mfu` must be one of hardware-full"),
        ({"features": ["magic"]}, "`magic` must be one of"),
        ({"seconds": 3.0}, "must have one figure"),
        ({"heads": 7}, "heads must divide the width"),
        ({"wheels": 4}, "wheels are not"),
        ({"layers": None}, "layers must be there"),
        ({"source": ""}, "`source` must be there"),
        ({"printed": {"seconds": 3.7}}, "seconds is printed as 3.7, but must be 3.5"),
    ],
)
def test_a_row_that_cannot_be_is_refused_with_its_reason(change, says):
    document = json.loads((FOLDER / "megatron_2021.json").read_text())
    first = dict(zip(document["columns"], document["rows"][0], strict=True))
    values = {"source": "x", **document["common"], **first, **first.pop("more"), **change}
    del values["more"]
    with pytest.raises(DataError, match=says):
        Row.of({key: value for key, value in values.items() if value is not None})


def test_rows_of_two_counts_are_not_compared(rows):
    megatron, selective = rows["1008B, Table 1"], rows["1T, selective"]
    assert megatron.rate.flop_per_s / 1e12 == pytest.approx(163, abs=0.5)
    with pytest.raises(ConfigError, match="one count"):
        megatron.rate.over(selective.rate)
    assert selective.rate.over(Rate("model", 1e12)) == pytest.approx(175.7, abs=0.5)


# Plans beside what was published.


def test_the_page_has_the_tables_that_the_data_gives(planned):
    (shown,) = TABLES.findall(PAGE.read_text(encoding="utf-8"))
    assert shown.strip() == tables(planned).strip()


def test_judged_rows_are_planned_within_bounds(planned):
    number, mean, worst = errors(planned)
    assert number >= 60
    assert mean <= 0.05
    assert worst <= 0.12


def test_korthikantis_eight_rows_are_nearer_than_calculons(planned):
    names = [f"{size}, {way}" for size in ("22B", "175B", "530B", "1T") for way in ("full", "selective")]
    eight = [one for one in planned if one.row.name in names]
    number, mean, worst = errors(eight)
    assert (number, mean <= 0.0365, worst <= 0.0887) == (8, True, True)


def test_blooms_layouts_are_ranked_within_their_campaigns(planned):
    sizes = [len(sweep(planned, family)) for family in ("bloom-2021", "bloom-2022")]
    assert sizes == [7, 11]
    assert tau(planned) >= 0.85


def test_blooms_heads_of_108_are_last(planned):
    for layout in ("T 8, P 6, b 4", "T 4, P 12, b 2"):
        mine = [one for one in planned if one.row.name.startswith("13,824") and layout in one.row.name]
        assert len(mine) == 3
        assert "128 heads" in max(mine, key=lambda one: one.seconds).row.name


def test_layouts_that_did_not_fit_need_more_than_there_is(rows):
    device = rows["176B"].machine.load()
    bloom = [row for row in rows.values() if row.software.family.startswith("bloom")]
    assert sum(not row.figure.fits for row in bloom) == 2
    for row in bloom:
        assert (Step(row).resting_bytes < device.allocator_bytes) is row.figure.fits, row.name


def test_relations_of_megatron_2021_hold(rows):
    """On 64 GPUs T8 x P8 is the best of 162B's splits at a small batch, and b = 2 of 91B's micro-batches."""
    base = rows["529.6B, Table 1"]
    small = changed(base, layers=32, hidden=20480, ffn=81920, gpus=64, virtual=1, global_batch=32)
    times = {t: Step(changed(small, tensor=t, pipeline=64 // t)).parts.total for t in (2, 4, 8, 16, 32)}
    assert min(times, key=times.__getitem__) == 8
    other = changed(small, hidden=15360, ffn=61440, pipeline=8, global_batch=128)
    by_batch = {b: Step(changed(other, micro_batch=b)).parts.total for b in (1, 2, 4, 8)}
    assert min(by_batch, key=by_batch.__getitem__) == 2


# Laws.


@over_table("name", ["175B, selective", "D 8, T 8, P 6, b 4", "GPT-3 175B, 128 GPUs", "22B, full"])
def test_the_closed_form_is_what_the_simulation_finds(rows, name):
    step = Step(rows[name])
    layout = step.layout
    kind = "interleaved" if layout.virtual > 1 else "1f1b"
    chunks = layout.pipeline * layout.virtual
    stage_of = [chunk % layout.pipeline for chunk in range(chunks)]
    forward, backward = (
        tuple(step.stages[stage][way] / layout.virtual for stage in stage_of) for way in (0, 1)
    )
    schedule = build_schedule(kind, layout.pipeline, layout.microbatches, layout.virtual)
    makespan = simulate(schedule, Costs(forward=forward, backward=backward)).makespan
    assert step.parts.pipeline + step.parts.bubble == pytest.approx(makespan, rel=0.01)


def test_eight_replicas_cost_530b_what_was_published(rows):
    one, eight = (Step(rows[f"530B, selective{tail}"]).parts.total for tail in ("", ", D 8"))
    assert eight - one == pytest.approx(39.15 - 37.83, abs=0.2)
    hidden = changed(rows["530B, selective, D 8"], features=("async-tensor", "dp-overlap", "dropout"))
    assert Step(hidden).parts.replicas < Step(rows["530B, selective, D 8"]).parts.replicas / 2


def test_gradients_of_two_bytes_halve_the_traffic_of_replicas(rows):
    row = rows["530B, selective, D 8"]
    four, two = (Step(changed(row, gradient_bytes=size)).parts.replicas for size in (4, 2))
    assert two == pytest.approx(four / 2, rel=0.02)


def test_recomputing_a_layer_repeats_its_calls(rows):
    step = Step(rows["530B, full"])
    assert step.recomputed == step.forward > 2 * step.joined
    assert Step(rows["530B, selective"]).recomputed < 0.1 * step.forward


def test_a_layer_less_beside_the_head_helps_small_models(rows):
    """The head is 2.4 layers of Llama 3 8B and 0.7 of 405B."""
    for name, layers in (("Llama 3.1 8B, 8 GPUs", 2.4), ("Llama 3.1 405B, 512 GPUs", 0.7)):
        row = rows[name]
        step = Step(row)
        head = row.shape.hidden * row.shape.vocabulary / row.shape.block_parameters
        assert head == pytest.approx(layers, abs=0.05)
        assert 0.5 * layers < step.head / (step.forward + step.backward) < 1.5 * layers
    row = changed(rows["Llama 3.1 8B, 8 GPUs"], pipeline=2, context=1, layers=32)
    even = Step(row)
    slowest = max(sum(stage) for stage in even.stages)
    layer = even.forward + even.backward
    moved = [sum(even.stages[0]) + layer, sum(even.stages[1]) - layer]
    assert max(moved) < slowest


def test_a_sharded_optimizer_makes_the_update_short(rows):
    row = changed(rows["530B, selective, D 8"], zero=1)
    times = [Step(changed(row, gpus=280 * data, global_batch=280 * data)).update for data in (1, 8, 64)]
    assert times[0] > 2.5 * times[1] > 2.5 * times[2]
    whole = Step(rows["530B, selective, D 8"]).update
    assert times[1] < whole < 0.01 * rows["530B, selective, D 8"].seconds


def test_a_ramp_of_the_batch_takes_longer_than_none(rows):
    """Small batches have larger bubbles: the time of as many tokens is an integral over the ramp."""
    row = rows["13,824, 96 heads, batch 1024"]
    seconds = {
        size: Step(changed(row, global_batch=size)).parts.total / size for size in (512, 1024, 1536, 2048)
    }
    assert sorted(seconds.values(), reverse=True) == list(seconds.values())
    assert sum(seconds.values()) / 4 > 1.1 * seconds[2048]
