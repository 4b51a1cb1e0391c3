"""Traces: a window, ranks, a bound on size; a full disk is a message; clocks of ranks are aligned."""

from __future__ import annotations

import errno
import gzip
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megazero import cli
from megazero.account.profilers.files import Folder
from megazero.account.profilers.merge import (
    Alignment,
    EndsOfCalls,
    align,
    alignment_lines,
    merge_traces,
    read_trace,
)
from megazero.account.profilers.traces import TraceWindow, write_trace
from megazero.config.tree.profiling import ProfilingConfig
from megazero.errors import DataError
from megazero.mpu.context import ParallelContext
from megazero.mpu.launch import Launch, open_context
from megazero.train.pretraining import pretrain_on
from tests.account.profilers.runs import config_of, train

CPU = torch.device("cpu")


def _trace(rank: int, world_size: int, folder: str) -> None:
    flags = (
        "--global-batch-size 8 --tensor-model-parallel-size 2 --profile --profile-step-start 1 "
        f"--profile-step-end 3 --profile-ranks -1 --profile-dir {folder}"
    )
    config = config_of(flags, world_size)
    context: ParallelContext = open_context(config.parallel, Launch(rank, world_size, rank), CPU)
    pretrain_on(config, context)


@pytest.fixture(scope="module")
def traced(pool, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("traces")
    pool.run(_trace, 2, str(folder))
    return folder


def names(path: Path) -> list[str]:
    return [str(event.get("name")) for event in read_trace(path)["traceEvents"]]


def test_the_steps_of_the_window_are_traced_on_each_rank(traced: Path) -> None:
    files = sorted(str(path.relative_to(traced)) for path in traced.rglob("*") if path.is_file())
    assert files == [f"step{step}/rank{rank}.json.gz" for step in (2, 3) for rank in (0, 1)]
    for rank in (0, 1):
        events = names(traced / f"step2/rank{rank}.json.gz")
        assert "aten::addmm" in events or "aten::linear" in events
        assert any(name.startswith("tp@0 all_reduce #") for name in events)


def shifted(source: Path, target: Path, microseconds: float, host: str) -> None:
    trace = read_trace(source)
    trace["host_name"] = host
    for event in trace["traceEvents"]:
        if "ts" in event:
            event["ts"] += microseconds
    target.write_bytes(gzip.compress(json.dumps(trace).encode()))


@pytest.mark.parametrize("host", ["another", "the same"])
def test_a_clock_that_is_ahead_is_set_back(traced: Path, tmp_path, host: str, capsys) -> None:
    """3.7 seconds apart, whatever the hosts are called."""
    shifted(traced / "step2/rank0.json.gz", tmp_path / "rank0.json.gz", 0.0, "the same")
    shifted(traced / "step2/rank1.json.gz", tmp_path / "rank1.json.gz", 3.7e6, host)
    assert cli.main(["merge-traces", str(tmp_path)]) == 0
    ends: dict[str, dict[int, float]] = {}
    merged = read_trace(tmp_path / "merged.json.gz")["traceEvents"]
    for event in merged:
        if str(event.get("name")).startswith("tp@0 all_reduce"):
            ends.setdefault(event["name"], {})[event["pid"] // 10_000_000] = event["ts"] + event["dur"]
    apart = sorted(abs(pair[0] - pair[1]) for pair in ends.values())
    assert len(apart) > 10
    assert apart[len(apart) // 2] < 20_000.0  # microseconds: two processes share two cores
    processes = {event["args"]["name"][:6] for event in merged if event.get("name") == "process_name"}
    assert processes == {"rank 0", "rank 1"}
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("rank 1: clock +3")
    assert f"wrote {tmp_path / 'merged.json.gz'}" in lines[2]


def ends(host: str = "a", **at: float) -> EndsOfCalls:
    return EndsOfCalls(host, at)


def test_clocks_are_chained_along_shared_calls() -> None:
    """Ranks 0 and 2 share none; the third call of rank 1 is an outlier."""
    ranks = {
        0: ends("a", x=10.0, y=20.0, z=30.0),
        1: ends("b", x=110.0, y=121.0, z=9999.0, u=5.0),
        2: ends("c", u=1005.0),
        3: ends("d", lonely=1.0),
    }
    assert align(ranks) == [
        Alignment(0, 0.0, 3, 0.0),
        Alignment(1, 101.0, 3, 1.0),
        Alignment(2, 1101.0, 1, 0.0),
        Alignment(3, 0.0, 0, 0.0),
    ]
    assert alignment_lines(align(ranks))[1:] == [
        "rank 1: clock +0.101 ms against rank 0's, by 3 calls that scatter by 0.001 ms",
        "rank 2: clock +1.101 ms against rank 0's, by 1 calls that scatter by 0.000 ms",
        "rank 3: shares no call with the others, so its clock is left as it is",
    ]


def test_ranks_of_one_host_have_one_clock() -> None:
    assert [one.ahead for one in align({0: ends(x=10.0), 1: ends(x=1500.0)})] == [0.0, 0.0]


def test_on_a_device_calls_end_with_their_kernels() -> None:
    def kernel(ts: float, ranks: str, operation: str = "_allreduce_base") -> dict:
        args = {"Collective name": operation, "Process Group Name": "7", "Process Group Ranks": ranks}
        return {
            "ph": "X",
            "name": "ncclDevKernel_AllReduce_Sum_f32_RING_LL",
            "ts": ts,
            "dur": 5.0,
            "args": args,
        }

    events = [
        {"ph": "X", "name": "tp@0 all_reduce #4", "ts": 1.0, "dur": 1.0},
        kernel(100.0, "[0, 1]"),
        kernel(200.0, "[0, 1]"),
        kernel(300.0, "[0, 2]"),
        kernel(400.0, "[0, 1]", "send"),
    ]
    trace = {"host_name": "h", "baseTimeNanoseconds": 1_000_000, "traceEvents": events}
    assert EndsOfCalls.of(trace).at == {
        "_allreduce_base 7 [0, 1] #1": 1105.0,
        "_allreduce_base 7 [0, 1] #2": 1205.0,
        "_allreduce_base 7 [0, 2] #1": 1305.0,
    }
    assert EndsOfCalls.of({**trace, "traceEvents": events[:1]}).at == {"tp@0 all_reduce #4": 1002.0}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cannot be read"),
        (gzip.compress(b'{"traceEvents": ['), "cannot be read"),
        (gzip.compress(b"[]"), "has no events"),
    ],
    ids=["empty", "cut off", "a list"],  # a compressed file holds the time
)
def test_what_is_no_trace_is_named(tmp_path, content: bytes, message: str, capsys) -> None:
    (tmp_path / "rank0.json.gz").write_bytes(content)
    assert cli.main(["merge-traces", str(tmp_path)]) == DataError.exit_code
    error = capsys.readouterr().err
    assert f"rank0.json.gz` must be a Chrome trace, but {message}" in error


def test_a_folder_without_traces_is_refused(tmp_path) -> None:
    with pytest.raises(DataError, match="must hold traces named rank<N>.json.gz, but has none"):
        merge_traces(tmp_path, tmp_path / "merged.json")


def test_no_further_step_is_traced_once_files_are_as_large_as_they_may_be(tmp_path) -> None:
    settings = ProfilingConfig(profile=True, profile_step_start=0, profile_step_end=4, profile_max_mb=1)
    folder, said = Folder(tmp_path / "bounded", writes=True), []
    window = TraceWindow(settings, folder, 0, CPU)
    window._say = said.append
    for iteration in range(1, 5):
        with window.over_step(iteration):
            torch.ones(1).add_(1)
            folder.written += 600_000
    assert sorted(path.name for path in (tmp_path / "bounded").iterdir()) == ["step1", "step2"]
    assert said[-1].startswith(
        "profile: the steps after 2 are not traced: 1.2 MB of files reach --profile-max-mb 1"
    )


def test_a_full_disk_is_one_warning_and_the_training_goes_on(tmp_path, capfd, monkeypatch) -> None:
    """torch writes what fits, and says nothing."""

    def truncated(profiler: object, path: str) -> None:
        Path(path).write_text('{"traceEvents": [{"ph": "X", ')

    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", truncated)
    train("--profile --profile-step-start 0 --profile-step-end 3", tmp_path)
    out, err = capfd.readouterr()
    warnings = [line for line in err.splitlines() if "warning" in line and "profile" in line]
    assert warnings == [
        f"warning: `{tmp_path}/step1/rank0.json.gz` must be written, but is not: No space left on device; "
        "make room there or set another `--profile-dir`; the training goes on, and its profilers write no "
        "more"
    ]
    assert "iteration        4/       4" in out
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_folder_that_cannot_be_made_is_one_warning(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    said: list[str] = []
    folder = Folder(tmp_path / "file" / "folder", writes=True, warn=said.append)
    assert folder.write("a.json", b"{}") is None
    assert folder.write("b.json", b"{}") is None
    assert len(said) == 1
    assert "Not a directory" in said[0]


def test_a_compressed_file_that_does_not_fit_is_an_error_too(tmp_path, monkeypatch) -> None:
    def full(*given: object, **more: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    profiler = SimpleNamespace(export_chrome_trace=lambda path: Path(path).write_text('{"traceEvents": []}'))
    write_trace(profiler, tmp_path / "a.json.gz")
    assert read_trace(tmp_path / "a.json.gz") == {"traceEvents": []}
    monkeypatch.setattr(gzip, "open", full)
    with pytest.raises(OSError, match="No space left"):
        write_trace(profiler, tmp_path / "b.json.gz")
    assert [path.name for path in tmp_path.iterdir()] == ["a.json.gz"]


def test_ranks_that_are_not_chosen_trace_nothing() -> None:
    settings = ProfilingConfig(profile=True, profile_ranks=(3,))
    assert [settings.chosen(rank) for rank in (0, 3)] == [False, True]
    assert ProfilingConfig(profile_ranks=(-1,)).chosen(17)
