"""Devices as data: what the files say, and what is refused."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path

import pytest

from megazero.errors import ConfigError
from megazero.plan.device import Device, known_devices
from megazero.plan.hardware import Curve
from tests.tables import over_table

DEVICES = ("a100-40g", "a100-80g", "b200", "cpu", "gb200", "h100", "h200", "v100-32g")


@pytest.fixture
def a100():
    return Device.load("a100-80g").document()


def refusals(document) -> list[str]:
    with pytest.raises(ConfigError) as error:
        Device.of(document, "mine.json")
    return error.value.violations


def test_the_devices_of_the_package_are_known():
    assert tuple(known_devices()) == DEVICES


@over_table("name", DEVICES)
def test_a_device_is_what_its_document_says(name):
    device = Device.load(name)
    assert device.name == name
    assert Device.of(json.loads(json.dumps(device.document()))) == device
    assert 0 < device.allocator_bytes < device.memory.size_gib * 2**30


def test_an_80_gb_card_leaves_74_to_76_gib():
    for name in ("a100-80g", "h100"):
        assert 74 * 2**30 < Device.load(name).allocator_bytes < 76 * 2**30


def test_both_ways_of_nvlink_together_are_refused_as_one_way(a100):
    a100["inside_node"]["nvlink_gb_per_s_one_way"] = 600
    (text,) = refusals(a100)
    assert "inside_node.nvlink_gb_per_s_one_way` must be at most 300" in text
    assert "12 links of generation 3, but is 600; both ways together are twice one way" in text


def test_a_key_without_its_unit_is_refused(a100):
    a100["memory"]["size_gb"] = a100["memory"].pop("size_gib")
    assert sorted(refusals(a100)) == [
        "mine.json: `memory.size_gb` must be a key of a device, but is not; remove it, or correct its unit",
        "mine.json: `memory.size_gib` must be there, but is missing; add it",
    ]


@pytest.mark.parametrize(
    ("part", "key", "value", "says"),
    [
        ("memory", "bandwidth_gb_per_s", -1, "`memory.bandwidth_gb_per_s` is refused"),
        ("memory", "size_gib", "much", "`memory.size_gib` is refused"),
        ("memory", "size_gib", float("nan"), "`memory.size_gib` is refused"),
        ("memory", "outside_allocator_gib", 80, "must be below `memory.size_gib`"),
        ("memory", "reached_share", 1.2, "at most 1, but is 1.2"),
        (
            "inside_node",
            "message",
            {"alpha_us": 1, "gb_per_s_by_mib": {}},
            "`inside_node.message` must be at most 300 GB/s, that of the wire, but is 0",
        ),
        ("inside_node", "nvlink_generation", 9, "nvlink_generation` must be at most 5"),
        ("between_nodes", "nic_gbit_per_s_per_rank", 25, "must be at most 3.125 GB/s, that of the wire"),
        (
            "compute",
            "matmul_mnk_tflop_per_s",
            {"bfloat16": [[1, 1, 1, 400]]},
            "rate of at most 312, the peak, but has 400",
        ),
        ("compute", "matmul_like", {"float16": ["float64", 1]}, "`compute.matmul_like.float16` must have"),
    ],
)
def test_what_cannot_be_is_refused_with_its_key(a100, part, key, value, says):
    a100[part][key] = value
    assert any(says in text for text in refusals(a100))


def test_each_number_has_a_source(a100):
    del a100["sources"]["memory.reached_share"], a100["sources"]["host"]
    texts = refusals(a100)
    assert "mine.json: `sources` must say where `memory.reached_share` is from, but does not; add it" in texts
    assert len(texts) == 1 + 6  # all keys of the host


def test_bus_bandwidth_may_exceed_the_wire_only_where_the_switch_adds_up():
    h100 = Device.load("h100").document()
    assert (
        h100["inside_node"]["collectives"]["all_reduce"]["8"]["gb_per_s_by_mib"]["16384.0"] == 480
    )  # of 450
    gathers = deepcopy(h100)
    gathers["inside_node"]["collectives"]["all_gather"]["8"]["gb_per_s_by_mib"]["512.0"] = 480
    assert "all_gather.8` must be at most 450 GB/s" in refusals(gathers)[0]
    h100["inside_node"]["nvls_from_ranks"] = 0
    assert "all_reduce.8` must be at most 450 GB/s" in refusals(h100)[0]


def test_a_file_may_be_like_a_device(tmp_path: Path):
    path = tmp_path / "ours.json"
    path.write_text(
        json.dumps(
            {
                "like": "a100-80g",
                "name": "ours",
                "memory": {"size_gib": 60},
                "sources": {"memory.size_gib": "us"},
            }
        )
    )
    ours, a100 = Device.load(path), Device.load("a100-80g")
    assert (ours.name, ours.memory.size_gib) == ("ours", 60)
    assert ours.memory.bandwidth_gb_per_s == a100.memory.bandwidth_gb_per_s
    assert ours.sources["memory.size_gib"] == "us"
    assert ours.compute == a100.compute


@over_table(
    ("text", "says"),
    [
        ("{", "must be JSON"),
        ("[]", "must be a JSON object"),
        ('{"like": "a1"}', "`like` must be one of a100-40g"),
        ('{"like": "h100", "compute": 3}', "`compute` is refused"),
        ('{"like": "h100", "sources": 3}', "`sources` is refused"),
    ],
)
def test_a_file_that_is_no_device_is_refused(tmp_path: Path, text, says):
    path = tmp_path / "ours.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        Device.load(path)


def test_a_name_that_is_no_device_is_refused_with_those_that_are(tmp_path: Path):
    with pytest.raises(ConfigError, match="must be one of a100-40g, .* or a file, but is `a100`"):
        Device.load("a100")
    with pytest.raises(ConfigError, match="directory"):
        Device.load(tmp_path)


def test_a_dtype_without_a_peak_is_refused():
    assert Device.load("h100").peak_flop_per_s("float8_e4m3fn") == 1979e12
    with pytest.raises(ConfigError, match="must be one that a100-80g multiplies"):
        Device.load("a100-80g").peak_flop_per_s("float8_e4m3fn")


def test_a_curve_is_linear_in_time_and_keeps_its_last_rate():
    curve = Curve(10, {1: 2**20 / 30e3, 4: 2**22 / 60e3})  # 30 and 60 microseconds
    sizes = (0, 2**19, 2**20, 5 * 2**19, 2**22, 2**23)
    assert [round(1e6 * curve.seconds(size), 6) for size in sizes] == [10, 20, 30, 45, 60, 120]
    assert 1e6 * curve.seconds(2**22, times=2) == pytest.approx(120)
    assert 1e6 * curve.scaled(2).seconds(2**23) == pytest.approx(60)
