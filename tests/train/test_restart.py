"""Real jobs that are stopped, or lose a rank, and continue: by themselves, on as many ranks, and on fewer."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megazero.checkpoint.folder import iteration_folder, latest_iteration, saved_iterations
from megazero.checkpoint.reader import CheckpointReader
from megazero.config.resolve import parse_config
from megazero.mpu.launch import Launch
from megazero.train.pretraining import pretrain
from tests.checkpoint.faulty_disk import FaultyDisk
from tests.checkpoint.power_cut import Change
from tests.forks import run
from tests.train.restart_ranks import MODEL, SAVING

pytestmark = [pytest.mark.gloo, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]

# The second rank dies within its third save, the first time.
WRAPPER = """
import os, sys
from megazero.config.resolve import parse_config
from megazero.train.pretraining import pretrain
from tests.checkpoint.faulty_disk import FaultyDisk, Refuse, Verdict, kill

def fault(change):
    if "iter_0000006" in str(change.path) and change.name == "write":
        return Verdict(kill, len(change.data) // 2)

first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
disk = FaultyDisk(fault) if first and os.environ["RANK"] == "1" else None
state = pretrain(parse_config(sys.argv[1:], world_size=2).config, disk=disk)
print(f"restart {os.environ['TORCHELASTIC_RESTART_COUNT']} ended at {state.iteration}", flush=True)
"""


def records(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def column(folder: Path, name: str) -> list:
    return [record[name] for record in records(folder)]


def tensors(folder: Path, iteration: int) -> dict[str, torch.Tensor]:
    reader = CheckpointReader(iteration_folder(folder / "run", iteration))
    return {str(key): reader.tensor(key) for key in reader.shapes if key.kind != "rng"}


@pytest.fixture(scope="module")
def jobs(tmp_path_factory) -> Path:
    """The folder of `restart_ranks.py`, when it is done."""
    folder = tmp_path_factory.mktemp("jobs")
    done = run("-m", "tests.train.restart_ranks", folder)
    assert done.returncode == 0, done.stderr
    statuses = json.loads((folder / "statuses.json").read_text())
    assert all(status == 0 for ranks in statuses.values() for status in ranks), statuses
    return folder


def test_the_same_ranks_continue_bit_for_bit(jobs):
    assert column(jobs / "stopped", "iteration") == [1, 2, 3, 4, 5]
    assert records(jobs / "on 4")[:5] == records(jobs / "stopped")
    for name in ("iteration", "consumed_samples", "lm_loss", "grad_norm", "learning_rate"):
        assert column(jobs / "on 4", name) == column(jobs / "straight", name)
    expected, found = tensors(jobs / "straight", 8), tensors(jobs / "on 4", 8)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


@pytest.mark.parametrize("name", ["on 2", "on 1"])
def test_fewer_ranks_keep_the_global_batch_and_the_order_of_the_data(jobs, name):
    assert column(jobs / "straight", "global_batch_size") == [4] * 8
    for exact in ("iteration", "consumed_samples", "consumed_tokens", "global_batch_size", "learning_rate"):
        assert column(jobs / name, exact) == column(jobs / "straight", exact)
    for rounded in ("lm_loss", "grad_norm"):
        expected = column(jobs / "straight", rounded)
        assert column(jobs / name, rounded) == pytest.approx(expected, rel=1e-5)
        assert len({round(loss, 3) for loss in expected}) > 4, "other data must be seen to give other losses"
    expected, found = tensors(jobs / "straight", 8), tensors(jobs / name, 8)
    assert expected.keys() == found.keys()
    for tensor in expected:
        torch.testing.assert_close(found[tensor], expected[tensor], rtol=1e-4, atol=1e-5)
    said = (jobs / name / "rank0.txt").read_text()
    assert "changed since the checkpoint: " in said
    assert "parallel.tensor_model_parallel_size: 2 -> 1" in said


def test_a_killed_job_continues_on_more_ranks_in_the_same_order(jobs):
    """Two ranks, of which one was killed after six steps, and then three; files, and more than one epoch."""
    assert json.loads((jobs / "killed.json").read_text())[1] == -signal.SIGKILL
    assert "/iter_0000004" in (jobs / "cyclic on 3" / "rank0.txt").read_text()
    for exact in ("iteration", "consumed_samples", "learning_rate"):
        assert column(jobs / "cyclic on 3", exact) == column(jobs / "cyclic", exact)
    expected = column(jobs / "cyclic", "lm_loss")
    assert column(jobs / "cyclic", "consumed_samples") == [12 * i for i in range(1, 9)]
    assert column(jobs / "cyclic on 3", "lm_loss") == pytest.approx(expected, rel=1e-5)
    assert len({round(loss, 4) for loss in expected}) == 8, "other data must be seen to give other losses"


@pytest.mark.parametrize(("name", "why"), [("signal", "another rank was asked"), ("duration", "--exit-dur")])
def test_what_ends_a_run_saves_it(jobs, name, why):
    assert f"stopping after iteration {latest_iteration(jobs / name / 'run')}: {why}" in (
        jobs / name / "rank0.txt"
    ).read_text().replace("\n", " ")
    assert latest_iteration(jobs / name / "run") == column(jobs / name, "iteration")[-1]
    assert len(saved_iterations(jobs / name / "run")) == 1


def test_a_second_signal_does_not_end_the_last_save(tmp_path):
    """Launchers pass on a SIGTERM that the ranks have had from the scheduler."""

    def fault(change: Change) -> None:
        # Within the save on the way, and within the one that it is the reason for.
        if change.name == "sync" and change.path.parent.name[:13] in (".iter_0000002", ".iter_0000003"):
            os.kill(os.getpid(), signal.SIGTERM)

    def mine(number: int, frame: object) -> None:
        raise AssertionError("the signal was not taken")

    before = signal.signal(signal.SIGTERM, mine)
    try:
        argv = [*MODEL.split(), "--train-iters", "50", "--save-interval", "2", "--save", str(tmp_path)]
        state = pretrain(parse_config(argv, world_size=1).config, Launch(), FaultyDisk(fault))
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)
    assert state.iteration == 3
    assert saved_iterations(tmp_path) == [2, 3]


@pytest.mark.slow
def test_torchrun_restarts_a_job_that_lost_a_rank(jobs, tmp_path):
    (tmp_path / "wrapper.py").write_text(WRAPPER)
    saving = ["--save", str(tmp_path / "run"), "--load", str(tmp_path / "run")]
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("--max-restarts", "2", str(tmp_path / "wrapper.py"), *MODEL.split(), *SAVING.split()),
        *("--tensor-model-parallel-size", "2", *saving, "--metrics-jsonl", str(tmp_path / "metrics.jsonl")),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "restart 1 ended at 8" in done.stdout
    assert "restart 0 ended" not in done.stdout
    assert f"loaded {tmp_path}/run/iter_0000003" in done.stdout
    for name in ("iteration", "consumed_samples", "lm_loss", "grad_norm", "learning_rate"):
        assert column(tmp_path, name) == column(jobs / "launched", name)
    expected, found = tensors(jobs / "launched", 8), tensors(tmp_path, 8)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert saved_iterations(tmp_path / "run") == [3, 6, 8]
