"""Rows in a process that may be lost."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from functools import partial

from benchmarks import rows
from benchmarks.rows import run_rows


def work(name: str, told: str = "") -> dict:
    """A row that does what its name says."""
    match name:
        case "raises":
            raise AssertionError("not so\nand more")
        case "hangs":
            time.sleep(60)
        case "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        case "leaves":
            os._exit(3)
    return {"name": name, "told": told, "process": os.getpid()}


def test_a_row_that_goes_wrong_costs_itself_alone():
    limits = {
        "first": 30.0,
        "raises": 30.0,
        "dies": 30.0,
        "second": 30.0,
        "hangs": 0.2,
        "leaves": 30.0,
        "last": 30.0,
    }
    lines = dict(run_rows(partial(work, told="x"), limits, 120))
    assert list(lines) == list(limits)
    assert lines["raises"].pop("trace").endswith("AssertionError: not so\nand more\n")
    assert {name: line["failed"] for name, line in lines.items() if "failed" in line} == {
        "raises": "AssertionError: not so",
        "dies": "its process ended with -9",
        "hangs": "it did not end within 0.2 s",
        "leaves": "its process ended with 3",
    }
    assert [lines[name]["name"] for name in ("first", "second", "last")] == ["first", "second", "last"]
    processes = {lines[name]["process"] for name in ("first", "second", "last")}
    assert len(processes) == 3
    assert os.getpid() not in processes
    assert lines["last"]["told"] == "x"


def test_a_device_that_refuses_further_work_is_left(monkeypatch):
    """After a fault in a kernel CUDA refuses all that its process asks for, and all later rows failed too."""

    class Idle:
        def __init__(self, work):
            self.usable, self.number = True, len(begun)
            begun.append(self)

        def line(self, name, seconds):
            self.usable = name != "faulty"
            return {"worker": self.number}

        def end(self):
            ended.append(self.number)

    begun, ended = [], []
    monkeypatch.setattr(rows, "Worker", Idle)
    lines = dict(run_rows(work, dict.fromkeys(["a", "faulty", "b", "c"], 1.0), 60))
    assert [line["worker"] for line in lines.values()] == [0, 0, 1, 1]
    assert ended == [0, 1]


def test_rows_are_left_out_when_the_time_is_over():
    assert dict(run_rows(work, {"a": 1.0, "b": 1.0}, 0)) == {
        "a": {"left_out": "0 s had passed"},
        "b": {"left_out": "0 s had passed"},
    }


def test_several_processes_work_at_a_time():
    lines = dict(run_rows(work, {"hangs": 0.2, "b": 30.0, "c": 30.0}, 120, workers=2))
    assert {name: line.get("name", line.get("failed")) for name, line in lines.items()} == {
        "hangs": "it did not end within 0.2 s",
        "b": "b",
        "c": "c",
    }
    assert multiprocessing.active_children() == []
