"""Each check of `tests/deepspeed/checks` here, beside what DeepSpeed 0.19.8 answered."""

from __future__ import annotations

import functools
import importlib
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.deepspeed.checks import checks_of
from tests.forks import run_ranks
from tests.tables import check_all

FOLDER = Path(__file__).with_name("checks")
AREAS = sorted(path.stem for path in FOLDER.glob("*.py") if not path.stem.startswith("_"))
SLOW = {"autotp"}  # areas that build dozens of models
CHECKS = {area: checks_of(importlib.import_module(f"tests.deepspeed.checks.{area}")) for area in AREAS}


@functools.cache
def values_here(area: str, ranks: int) -> dict[str, Any]:
    """What the area's checks for so many ranks give here."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["-m", "tests.deepspeed.checks", area, ranks, folder]
        done = run_ranks(*[command] * ranks)
        path = Path(folder) / f"{area}-{ranks}.json"
        assert path.exists(), done[0].stderr
        return json.loads(path.read_text())


@functools.cache
def answers(area: str) -> dict[str, Any]:
    """What DeepSpeed answered."""
    return json.loads((FOLDER / "answers" / f"{area}.json").read_text())


def assert_close(here: Any, there: Any, tolerance: float, place: str) -> None:
    """Both have the same shape, and numbers that differ by no more than `tolerance`."""
    if isinstance(there, dict):
        assert isinstance(here, dict), place
        assert sorted(here) == sorted(there), place
        for key, value in there.items():
            assert_close(here[key], value, tolerance, f"{place}.{key}")
    elif isinstance(there, list):
        assert isinstance(here, list), place
        assert len(here) == len(there), f"{place}: {here} for {there}"
        for index, value in enumerate(there):
            assert_close(here[index], value, tolerance, f"{place}[{index}]")
    elif isinstance(there, float):
        assert here == pytest.approx(there, rel=tolerance, abs=tolerance, nan_ok=True), place
    else:
        assert here == there, place


@pytest.mark.parametrize(
    "area", [pytest.param(area, marks=[pytest.mark.slow] * (area in SLOW)) for area in AREAS]
)
def test_a_script_sees_what_deepspeed_shows(area: str):
    def check_one(name: str) -> None:
        check = CHECKS[area][name]
        result = values_here(area, check.ranks).get(name, {"error": "the process ended before it"})
        assert "error" not in result, result["error"]
        shown = json.loads(json.dumps(check.here)) if check.why else answers(area)[name]["value"]
        assert_close(result["value"], shown, check.tolerance, name)

    check_all(((name, name) for name in CHECKS[area]), check_one)
