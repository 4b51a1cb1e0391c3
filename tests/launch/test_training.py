"""Three hosts train as one does, bit for bit, and go on after one of them is killed. Minutes long."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.launch.cluster import WHY_NOT, Cluster, has_sshd, is_alive, processes_of, until
from tests.source_tree import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not has_sshd(), reason=WHY_NOT)]

# The quickstart's settings, scaled down.
SETTINGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 32 --micro-batch-size 2 "
    "--global-batch-size 12 --lr 1e-3 --train-iters 8 --mock-data --vocab-size 64 --device cpu "
    "--log-interval 1 --eval-iters 0 --tensor-model-parallel-size 2 --zero-stage 1 --num-workers 0"
)


@pytest.fixture
def cluster(tmp_path):
    cluster = Cluster(tmp_path, 3)
    yield cluster
    cluster.close()


def losses(path: Path) -> list[float]:
    """The loss of each step, the last word on it where a step was made twice."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [
        v for _, v in sorted({row["iteration"]: row["lm_loss"] for row in rows if "lm_loss" in row}.items())
    ]


def flags(metrics: Path, *more: str) -> list[str]:
    return [str(ROOT / "pretrain_gpt.py"), *SETTINGS.split(), "--metrics-jsonl", str(metrics), *more]


def one_host(cluster: Cluster, metrics: Path, *more: str) -> list[float]:
    launch = cluster.begin(["--num-gpus", "6", *flags(metrics, *more)])
    assert launch.status(180) == 0, launch.notices()
    return losses(metrics)


@pytest.mark.parametrize("launcher", ["ssh", "torchrun"])
def test_three_hosts_train_as_one(cluster, tmp_path, launcher):
    words = ["-H", cluster.hostfile(2), "--launcher", launcher]
    launch = cluster.launch(*words, *flags(tmp_path / "three.jsonl"))
    assert launch.status(180) == 0, launch.notices()
    ours = losses(tmp_path / "three.jsonl")
    assert len(ours) == 8
    assert ours == one_host(cluster, tmp_path / "one.jsonl")


def test_a_killed_host_is_named_all_end_and_the_restart_trains_to_the_same_losses(cluster, tmp_path):
    metrics, folder = tmp_path / "three.jsonl", str(tmp_path / "checkpoint")
    longer = ["--train-iters", "40"]
    saved = [*longer, "--save", folder, "--load", folder, "--save-interval", "5"]
    words = ["-H", cluster.hostfile(2), "--max-restarts", "1", "--grace", "3"]
    launch = cluster.launch(*words, *flags(metrics, *saved))
    until(lambda: metrics.exists() and len(losses(metrics)) >= 8, 120, launch.notices)
    key = next(iter(_marks(cluster, "pretrain_gpt.py")))
    victims = list(processes_of(f"{key}/1"))
    everywhere = [pid for node in range(3) for pid in processes_of(f"{key}/{node}")]
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    until(lambda: "w-1" in launch.notices().partition("meet at")[2], 10, launch.notices)
    until(lambda: not any(map(is_alive, everywhere)), 30)
    assert launch.status(180) == 0, launch.notices()
    assert "the ranks are started again (1 of 1)" in launch.notices()
    assert losses(metrics) == one_host(cluster, tmp_path / "one.jsonl", *longer)


def test_sigusr1_at_the_launcher_saves_a_checkpoint_on_all_hosts(cluster, tmp_path):
    metrics, folder = tmp_path / "three.jsonl", tmp_path / "checkpoint"
    words = [*flags(metrics), "--train-iters", "4000", "--save", str(folder), "--save-interval", "4000"]
    launch = cluster.launch("-H", cluster.hostfile(2), *words)
    until(lambda: metrics.exists() and len(losses(metrics)) >= 3, 120, launch.notices)
    launch.send_signal(signal.SIGUSR1)
    assert launch.status(60) == 0, launch.notices()
    assert (folder / "latest_checkpointed_iteration.txt").read_text().strip() == str(len(losses(metrics)))


def test_torchruns_rendezvous_goes_on_without_a_lost_host(cluster, tmp_path):
    """Its agents see a lost host when their own ranks fail, as ranks in a collective call do."""
    (tmp_path / "elastic.py").write_text(
        "import os, sys, time\nworld = os.environ['WORLD_SIZE']\n"
        "os.write(1, f'world {world}\\n'.encode())  # ranks share a pipe\n"
        "while world == '6' and not os.path.exists('lost'): time.sleep(0.1)\n"
        "sys.exit(world == '6')\n"
    )
    words = ["--launcher", "torchrun", "--elastic-training", "--min-elastic-nodes", "2", "elastic.py"]
    options = (
        "--monitor-interval 1 --rdzv-conf last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3"
    )
    launch = cluster.launch("-H", cluster.hostfile(2), "--launcher-args", options, *words)
    launch.await_lines(6, "world 6", 90)
    key = next(iter(_marks(cluster, "elastic.py")))
    for pid in list(processes_of(f"{key}/2")):
        os.kill(pid, signal.SIGKILL)
    until(lambda: "the others go on without it" in launch.notices(), 10, launch.notices)
    (tmp_path / "lost").touch()
    assert launch.status(120) == 0, launch.notices()
    assert "w-2" in launch.notices()
    assert "pipe closed" not in launch.notices()
    assert len(launch.await_lines(4, "world 4")) == 4


def _marks(cluster: Cluster, word: str) -> set[str]:
    marks = set()
    for pid in processes_of(word):
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        if f"PYTHONPATH={cluster.folder}".encode() in b"\n".join(variables):
            marks |= {
                v.decode().split("=")[1].split("/")[0] for v in variables if v.startswith(b"MEGAZERO_LAUNCH=")
            }
    return marks
