"""Which runs are started, resumed and left alone; what is said of those that fail or are stopped."""

from __future__ import annotations

import io
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from megazero.ablate import runs
from megazero.ablate.progress import ProgressTable, RunState
from megazero.ablate.runs import run_all, training_command
from megazero.ablate.study import StudyOptions, read_study
from megazero.ablate.trial import Trial, fingerprint, trials_of
from tests.ablate.samples import quick_trainer, write_study


def trials(folder: Path, seeds: int = 1, ranks: int = 1, flags: tuple[str, ...] = ()) -> tuple[Trial, ...]:
    members = read_study(folder, StudyOptions(ranks=ranks, flags=flags)).members
    return trials_of(members, seeds, ranks, folder.parent / "out")


def run(todo, command) -> tuple[list[runs.Failure], list[str]]:
    console = Console(record=True, file=io.StringIO(), width=200)
    with ProgressTable(todo, console) as board:
        failures = run_all(todo, board, command)
    return failures, console.export_text().splitlines()


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(runs, "_GLANCE", 0.05)


def test_finished_runs_are_not_repeated(tmp_path):
    folder, command = write_study(tmp_path / "s", a="", b="optimizer: {lr: 1}"), quick_trainer(tmp_path)
    todo = trials(folder, seeds=2)
    assert run(todo, command) == (
        [],
        [
            "a, seed 1234: running, step 0/4",
            "a, seed 1234: finished, step 4/4, validation loss 0.1334",
            "b, seed 1234: running, step 0/4",
            "b, seed 1234: finished, step 4/4, validation loss 1.1234",
            "a, seed 1235: running, step 0/4",
            "a, seed 1235: finished, step 4/4, validation loss 0.1335",
            "b, seed 1235: running, step 0/4",
            "b, seed 1235: finished, step 4/4, validation loss 1.1235",
        ],
    )

    def never(trial: Trial) -> list[str]:
        raise AssertionError(f"{trial.name} is started again")

    failures, lines = run(trials(folder, seeds=2), never)
    assert failures == []
    assert [line.partition(", step")[0] for line in lines] == [
        f"{name}, seed {seed}: was finished" for seed in (1234, 1235) for name in "ab"
    ]
    assert [line.split()[0] for line in todo[0].log.read_text().splitlines()] == ["learning", "starts"]


def test_another_configuration_is_another_run_and_the_first_stays(tmp_path):
    folder, command = write_study(tmp_path / "s", a=""), quick_trainer(tmp_path)
    (before,) = trials(folder)
    run([before], command)
    (after,) = trials(folder, flags=("--lr", "2"))
    assert not after.finished()
    run([after], command)
    assert (before.finished(), after.finished()) == (True, True)
    assert before.folder != after.folder
    assert {path.name for path in (tmp_path / "out/runs").iterdir()} == {
        f"a-{trial.fingerprint}" for trial in (before, after)
    }


def test_a_failing_run_is_told_of_and_the_others_go_on(tmp_path):
    folder = write_study(tmp_path / "s", a="optimizer: {lr: 13}", b="")
    todo = trials(folder)
    failures, lines = run(todo, quick_trainer(tmp_path))
    assert [str(failure) for failure in failures] == [
        f"a, seed 1234: failed with status 1 ({todo[0].log})\n"
        "    learning rate 13.0\n    starts after step 0\n    a number is unlucky"
    ]
    assert lines[1:] == [
        "a, seed 1234: failed, step 2/4, validation loss 15.1234",
        "b, seed 1234: running, step 0/4",
        "b, seed 1234: finished, step 4/4, validation loss 0.1334",
    ]


def test_a_run_that_ends_early_without_an_error_is_a_failure(tmp_path):
    folder = write_study(tmp_path / "s", a="")
    (failure,), _ = run(trials(folder), lambda trial: ["true"])
    assert failure.reason == "stopped at step 0 of 4; run the command again to go on"
    (trial,) = trials(folder)
    trial.metrics.write_text('{"iteration": 4}\n')
    (failure,), _ = run([trial], lambda trial: ["true"])
    assert failure.reason == (
        "made all steps, but was not evaluated on validation data; check `split` or the data"
    )


def test_a_killed_run_is_named_with_its_signal_and_goes_on_when_called_again(tmp_path):
    folder = write_study(tmp_path / "s", a="optimizer: {lr: 7}", b="")
    todo, command, started = trials(folder), quick_trainer(tmp_path), []

    def with_pid(trial: Trial) -> list[str]:
        words = command(trial)
        pid = tmp_path / trial.member.name
        started.append(pid)
        return ["sh", "-c", f"echo $$ > {pid}; exec {words[0]} {words[1]} {words[2]}"]

    def kill() -> None:
        while todo[0].steps_done() < 2 or not todo[0].evaluations():
            time.sleep(0.02)
        os.kill(int(started[0].read_text()), signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    failures, _ = run(todo, with_pid)
    killer.join()
    assert [(failure.trial.member.name, failure.reason) for failure in failures] == [
        ("a", "was ended by SIGKILL")
    ]
    assert todo[1].finished()
    failures, lines = run(trials(folder), command)
    assert failures == []
    assert lines == [
        "a, seed 1234: running, step 2/4, validation loss 9.1234",
        "a, seed 1234: finished, step 4/4, validation loss 7.1234",
        "b, seed 1234: was finished, step 4/4, validation loss 0.1334",
    ]
    assert "starts after step 2" in todo[0].log.read_text()


@pytest.fixture
def hangups_count():
    """A hangup ends this process, also where it was started to outlive its terminal (nohup)."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("hangups_count")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_the_run_and_the_call(tmp_path, number):
    todo = trials(write_study(tmp_path / "s", a="optimizer: {lr: 7}", b=""))
    before = signal.getsignal(signal.SIGTERM)

    def stop() -> None:
        while todo[0].steps_done() < 2 or not todo[0].evaluations():
            time.sleep(0.02)
        os.kill(os.getpid(), number)

    stopper = threading.Thread(target=stop)
    stopper.start()
    with pytest.raises(KeyboardInterrupt):
        run(todo, quick_trainer(tmp_path))
    stopper.join()
    assert signal.getsignal(signal.SIGTERM) == before
    assert todo[0].steps_done() == 2
    assert not todo[1].folder.exists()


def test_a_run_has_its_whole_configuration_in_a_file(tmp_path):
    folder = write_study(
        tmp_path / "s",
        a="checkpoint: {save_retain_interval: 2}\nlogging: {csv_dir: tables}",
        b="",
        c="training: {seed: 5}",
    )
    a, b, c, a2, *_ = trials(folder, seeds=2)
    run([b], quick_trainer(tmp_path))
    config = yaml.safe_load(b.settings.read_text())
    assert config["model"]["hidden_size"] == 8
    assert config["training"]["seed"] == 1234
    assert config["logging"]["metrics_jsonl"] == f"{b.folder}/metrics.jsonl"
    saved = config["checkpoint"]
    assert saved["save"] == saved["load"] == f"{b.folder}/checkpoint"
    assert (saved["save_interval"], saved["keep_last"]) == (1, 1)
    assert a.config().checkpoint.keep_last is None
    assert (b.config().logging.tensorboard_dir, a.config().logging.csv_dir) == (None, "tables/a/seed-1234")
    assert (c.seed, a2.seed) == (5, 1235)
    assert a2.folder == a.folder.parent / "seed-1235"


def test_several_ranks_are_started_by_torchrun(tmp_path):
    (one,) = trials(write_study(tmp_path / "s", a=""))
    (two,) = trials(tmp_path / "s", ranks=2)
    assert training_command(one)[1:] == [training_command(one)[1], "--config", str(one.settings)]
    assert training_command(one)[1].endswith("/pretrain_gpt.py")
    assert training_command(two)[1:6] == [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]


def test_the_fingerprint_is_of_what_decides_the_result(tmp_path):
    folder = write_study(tmp_path / "s", a="")
    (tmp_path / "d.bin").write_bytes(b"12345")
    (tmp_path / "e").mkdir()
    (tmp_path / "e/d.bin").write_bytes(b"54321")

    def printed(*flags: str, ranks: int = 1) -> str:
        (member,) = read_study(folder, StudyOptions(ranks=ranks, flags=flags)).members
        return fingerprint(member.config, ranks)

    plain = printed()
    assert len(plain) == 8
    same = [("--seed", "7"), ("--log-interval", "3"), ("--save-interval", "2"), ("--data-cache-path", "x")]
    assert {printed(*flags) for flags in same} == {plain}
    others = [("--lr", "3"), ("--train-iters", "5"), ("--num-layers", "2"), ("--micro-batch-size", "1")]
    assert len({plain, printed(ranks=2), *(printed(*flags) for flags in others)}) == 6
    data = ("--mock-data=false", "--data-path")
    here = printed(*data, str(tmp_path / "d"))
    assert printed(*data, str(tmp_path / "e/d")) == here != plain
    (tmp_path / "d.bin").write_bytes(b"123456")
    assert printed(*data, str(tmp_path / "d")) != here


def test_a_terminal_has_a_live_table(tmp_path):
    (trial,) = trials(write_study(tmp_path / "s", a=""))
    console = Console(record=True, file=io.StringIO(), width=100, force_terminal=True)
    with ProgressTable([trial], console) as board:
        board.show(trial, RunState.RUNNING)
    shown = [line.split() for line in console.export_text().splitlines() if line.strip()]
    assert shown[-2:] == [
        ["run", "state", "step", "validation", "loss"],
        ["a,", "seed", "1234", "running", "0/4"],
    ]
