"""`megazero profile`: what ranks measure becomes a device; bad input; a real run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from megazero.account.profilers.calls import CollectiveCall
from megazero.commands.profile import document, main
from megazero.errors import ConfigError
from megazero.mpu.solo_group import SoloGroup
from megazero.mpu.thread_group import ThreadWorld
from megazero.plan.device import Device
from megazero.plan.measure import MachineMeasurements, MeasuredSizes, measure, without_repeats
from megazero.plan.prices import Prices

CPU = torch.device("cpu")
SMALL = MeasuredSizes(((16, 16, 16), (32, 16, 16)), (torch.float32, torch.bfloat16), (8, 1, 8), 1, (0.01,))


@pytest.fixture(scope="module")
def measured() -> MachineMeasurements:
    world = ThreadWorld(2)
    return world.run(lambda rank: measure(world.group("world", rank, (0, 1)), CPU, SMALL))[0]


@pytest.mark.slow
def test_what_two_ranks_measure_is_a_device(measured):
    kept = MachineMeasurements(**json.loads(json.dumps(asdict(measured))))  # as it comes from the first rank
    device = Device.of(document(kept, Device.load("cpu"), 2, "cpu"))
    rows = device.compute.matmul_mnk_tflop_per_s
    assert {dtype: [row[:3] for row in rows[dtype]] for dtype in rows} == {
        "float32": [(16, 16, 16), (32, 16, 16)],
        "bfloat16": [(16, 16, 16), (32, 16, 16)],
    }
    for dtype, table in rows.items():
        assert device.peak_flop_per_s(dtype) == 1e12 * max(row[3] for row in table)
    assert device.inside_node.ranks == 2
    assert {name: list(tables) for name, tables in device.inside_node.collectives.items()} == {
        name: [2] for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
    }
    assert not device.memory.apart
    assert device.sources["compute.launch_us"] == "measured by `megazero profile`, 2 ranks at once"
    seconds = [
        Prices(device).call(CollectiveCall("g", "all_reduce", size, (0, 1))) for size in (64, 10**4, 10**6)
    ]
    assert 0 < seconds[0] <= seconds[1] < seconds[2]


def test_one_rank_measures_no_calls_and_plans_none():
    alone = measure(SoloGroup("world"), CPU, SMALL)
    device = Device.of(document(alone, Device.load("cpu"), 1, "cpu"))
    with pytest.raises(
        ConfigError, match=r"has rates for \(none\), but is all_reduce; .* measure more ranks"
    ):
        Prices(device, 2).call(CollectiveCall("g", "all_reduce", 8, (0, 1)))


@pytest.mark.slow
def test_a_line_names_a_thing_once(measured):
    names = [what for what, _, _ in without_repeats(measured.lines) if what]
    assert names == [
        *("product, float32", "product, bfloat16"),
        *(
            f"attention {way}, {dtype}"
            for dtype in ("float32", "bfloat16")
            for way in ("forward", "backward")
        ),
        *("copy, read and written", "an operator"),
        *("all_reduce of 2", "all_gather of 2", "reduce_scatter of 2", "all_to_all of 2", "message"),
    ]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--nproc", "0"], "`--nproc` must be from 1 to"),
    ],
)
def test_bad_flags_are_refused(flags, says, capsys):
    assert main(["--device", "cpu", *flags]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.slow
def test_this_machine_is_measured_within_a_minute(tmp_path: Path):
    path = tmp_path / "here.json"
    command = [sys.executable, "-m", "megazero.cli", "profile", "--device", "cpu", "--output", str(path)]
    run = subprocess.run(command, capture_output=True, text=True, env={**os.environ}, timeout=120)
    assert run.returncode == 0, run.stderr
    assert "all_reduce of 2" in run.stdout
    device = Device.load(path)
    assert device.inside_node.ranks == 2
    assert Prices(device).call(CollectiveCall("g", "reduce_scatter", 2**20, (0, 1))) > 0
