"""What is in the fast tier, and the table that it is chosen by."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.durations import ROOT, DurationsWriter, all_test_files, read_cases, read_durations, write_durations
from tests.tables import over_table
from tests.tiers import MARKED, SECONDS, FastTier, left_for_slow

# Where the one layout of each kind is that a commit waits for.
KINDS = {
    "decoders, ranks as threads and as processes": "equivalence/test_layouts.py",
    "encoders": "equivalence/test_encoder_layouts.py",
    "experts": "equivalence/test_expert_layouts.py",
    "growing sequences": "equivalence/test_curriculum.py",
    "dropped tokens": "equivalence/test_skipping.py",
    "a teacher": "equivalence/test_distillation.py",
    "classifiers": "equivalence/test_classifiers.py",
    "other optimizers": "equivalence/test_optimizers.py",
    "offloaded state": "equivalence/test_stores.py",
    "checkpoints on other layouts": "equivalence/test_reshard.py",
    "Hugging Face": "formats/hf/test_reader.py",
    "stages of ZeRO": "zero/test_stages.py",
    "a resumed run": "train/test_resume.py",
    "a fine-tuning": "train/finetuning/test_run.py",
    "a killed save": "checkpoint/test_killed.py",
    "a fault in a run": "test_fault_matrix.py",
    "models of others' scripts": "deepspeed/test_initialize.py",
    "the oracle": "oracle/test_oracle.py",
    "operators": "ops/test_sweep.py",
    "update rules": "optim/test_conformance.py",
    "`megazero verify`": "commands/test_verify.py",
    "architecture": "test_architecture.py",
}


def test_the_table_names_files_that_there_are():
    """Refresh it with `bash scripts/test.sh --write-durations`."""
    seconds = read_durations()
    assert seconds.keys() <= all_test_files()
    assert list(seconds) == sorted(seconds)
    assert {name.partition("::")[0] for name in read_cases()} <= seconds.keys()


@over_table("kind", KINDS)
def test_one_of_each_kind_is_fast(kind):
    assert MARKED.search((ROOT / "tests" / KINDS[kind]).read_text(encoding="utf-8"))


def test_each_folder_of_tests_has_fast_ones():
    tier, folders = FastTier(), defaultdict(list)
    for name in all_test_files():
        folders[Path(name).parent].append(tier.has_fast(ROOT / name))
    assert [str(folder) for folder, fast in folders.items() if not any(fast)] == []


def test_what_is_fast_takes_a_minute_of_a_core():
    assert sum(seconds for seconds in read_durations().values() if seconds <= SECONDS) < 60


@over_table(
    ("file", "marks", "fast"),
    [
        ("tests/quick.py", (), True),
        ("tests/quick.py", ("gloo",), False),
        ("tests/quick.py", ("gloo", "fast"), True),
        ("tests/quick.py", ("slow", "fast"), False),
        ("tests/long.py", (), False),
        ("tests/long.py", ("fast",), True),
        ("tests/new.py", (), True),
    ],
)
def test_which_tests_are_fast(monkeypatch, file, marks, fast):
    monkeypatch.setattr("tests.tiers.read_durations", lambda: {"tests/quick.py": 0.5, "tests/long.py": 0.7})
    item = SimpleNamespace(
        path=ROOT / file, iter_markers=lambda: [SimpleNamespace(name=mark) for mark in marks]
    )
    assert FastTier().is_fast(item) is fast


def test_files_without_fast_tests_are_not_imported(monkeypatch, tmp_path):
    monkeypatch.setattr("tests.tiers.ROOT", tmp_path)
    monkeypatch.setattr("tests.tiers.read_durations", lambda: {"test_a.py": 9.0, "test_b.py": 9.0})
    (tmp_path / "test_a.py").write_text("@pytest.mark.fast\ndef test_a(): pass\n")
    (tmp_path / "test_b.py").write_text("def test_b(): pass\n")
    (tmp_path / "samples.py").write_text("")
    tier = FastTier()
    ignored = {name: tier.pytest_ignore_collect(tmp_path / name) for name in ("test_a.py", "test_b.py")}
    assert ignored == {"test_a.py": None, "test_b.py": True}
    assert tier.pytest_ignore_collect(tmp_path / "samples.py") is None


class Case:
    """A collected case, as far as a tier looks at it."""

    def __init__(self, nodeid: str, asked: float | None = None, fast: bool = False):
        self.nodeid = nodeid
        self._marks = {"fast": SimpleNamespace()} if fast else {}
        self._marks |= {} if asked is None else {"seconds": SimpleNamespace(args=(asked,))}

    def get_closest_marker(self, name: str) -> SimpleNamespace | None:
        return self._marks.get(name)


@pytest.mark.parametrize(
    ("cases", "seconds", "kept"),
    [
        ([Case(f"a::t[{i}]") for i in range(4)], 0.4, range(4)),
        ([Case(f"a::t[{i}]") for i in range(11)], 0.32, (0, 2, 5, 8, 10)),
        ([Case(f"a::t[{i}]") for i in range(9)], 1.5, (0, 8)),
        ([Case(f"a::t[{i}]") for i in range(9)], 60.0, (0,)),
        ([Case(f"a::t[{i}]", asked=10.0) for i in range(11)], 1.0, (0, 1, 2, 3, 4, 6, 7, 8, 9, 10)),
        ([Case(f"a::t[{i}]", fast=i == 1) for i in range(9)], 60.0, (0, 1)),
        ([Case("a::t")], 60.0, (0,)),
        ([Case(f"a::t[{i}]") for i in range(3)], None, range(3)),
    ],
)
def test_cases_by_default_are_spread_over_all(cases, seconds, kept):
    left = left_for_slow(cases, {} if seconds is None else {"a::t": seconds})
    assert [case for case in cases if case not in left] == [cases[place] for place in kept]


def test_what_ran_gets_new_rows_and_what_is_gone_loses_its_own(monkeypatch, tmp_path):
    table, files = tmp_path / "durations.txt", {"tests/a.py", "tests/b.py"}
    first = {"tests/a.py": 1.0, "tests/b.py": 2.04, "tests/gone.py": 3.0}
    write_durations(first, {"tests/a.py::test_x": 0.25, "tests/b.py::test_y": 0.5}, files, table)
    assert read_durations(table) == {"tests/a.py": 1.0, "tests/b.py": 2.0}
    assert read_cases(table) == {"tests/a.py::test_x": 0.25, "tests/b.py::test_y": 0.5}
    write_durations(
        {"tests/a.py": 2.0}, {"tests/a.py::test_z": 0.125, "tests/a.py::brief": 0.01}, files, table
    )
    assert read_cases(table) == {"tests/a.py::test_z": 0.12, "tests/b.py::test_y": 0.5}
    quick = {"tests/b.py": 2.0}, {"tests/b.py::test_y": 0.25}, files, table
    write_durations(*quick, partly={"tests/b.py::test_y"})  # its long cases were left out
    assert read_cases(table)["tests/b.py::test_y"] == 0.5
    write_durations(*quick)
    assert read_cases(table)["tests/b.py::test_y"] == 0.25
    writer = DurationsWriter()
    for name, seconds in (
        ("tests/a.py::test_x[1]", 0.25),
        ("tests/a.py::test_x[1]", 0.5),
        ("tests/a.py::test_x[2]", 0.25),
        ("tests/c.py::test", 7),
    ):
        writer.pytest_runtest_logreport(SimpleNamespace(nodeid=name, duration=seconds, skipped=False))
    writer.pytest_runtest_logreport(
        SimpleNamespace(nodeid="tests/a.py::test_x[3]", duration=0.0, skipped=True)
    )
    kept: list[dict[str, float]] = []
    monkeypatch.setattr(
        "tests.durations.write_durations", lambda *tables, partly: kept.extend([*tables[:2], partly])
    )
    writer.pytest_sessionfinish(None, pytest.ExitCode.TESTS_FAILED)
    assert kept == []
    writer.pytest_sessionfinish(None, pytest.ExitCode.OK)
    assert kept == [{"tests/a.py": 1.0, "tests/c.py": 7}, {"tests/a.py::test_x": 0.5}, {"tests/a.py::test_x"}]
