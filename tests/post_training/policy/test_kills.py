"""Trainings by policy gradients that are killed, and the toy of the reference on five layouts."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megazero.checkpoint.folder import latest_iteration
from megazero.ops import native
from tests.layouts.layout import Layout
from tests.post_training.policy.toy import train, write_prompts
from tests.source_tree import ROOT

pytestmark = [
    pytest.mark.skipif(not native.available(), reason="the compiled kernels are not built"),
    pytest.mark.slow,
]

STEPS, KILLS = 8, 3
LINE = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --normalization RMSNorm "
    "--activation swiglu --disable-bias-linear --position-embedding-type rope --init-method-std 0.1 "
    "--vocab-size 16 --tokenizer-type NullTokenizer --device cpu --log-interval 1 --lr 1e-2 "
    f"--lr-decay-style constant --train-iters {STEPS} --micro-batch-size 2 --global-batch-size 8 "
    "--policy-method dapo --group-size 4 --max-answer-tokens 8 --prompts-per-rollout 2 "
    "--rollout-iterations 2 --resample-rounds 2 --save-interval 1"
)
SLOWED = """
def judge(prompts, completions, completion_ids, **columns):
    import time
    time.sleep({pause})  # so that a rollout takes as long as its updates, and is hit as often
    return [sum(token == 3 for token in ids) / 8 for ids in completion_ids]
"""


def command(folder: Path, run: str, pause: float) -> list[str]:
    """A run on two ranks, which goes on from what is in its folder."""
    judge = folder / f"judge_{run}.py"
    judge.write_text(SLOWED.format(pause=pause))
    prompts, place = write_prompts(folder), str(folder / run)
    files = ["--prompts", str(prompts), "--reward-functions", f"{judge}:judge", "--save", place]
    files += ["--load", place, "--metrics-jsonl", str(folder / f"{run}.jsonl")]
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return [sys.executable, *ranks, "-m", "megazero.cli", "rl", *LINE.split(), *files]


def kill(launcher: int) -> None:
    """Kill the launcher and its ranks, which it would otherwise end in order."""
    ranks = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    for process in (launcher, *map(int, ranks)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def curve(path: Path) -> dict[int, list]:
    """Iteration -> what was reported of it last."""
    rows = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    names = ("reward", "policy_loss", "grad_norm", "resampled", "entropy")
    return {row["iteration"]: [row[name] for name in names] for row in rows if "reward" in row}


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    path = folder / f"iter_{latest_iteration(folder):07d}"
    return {f"{p.stem}/{k}": v for p in sorted(path.glob("*.safetensors")) for k, v in load_file(p).items()}


def test_a_run_that_is_killed_again_and_again_ends_as_one_that_was_not(tmp_path):
    """Two ranks are killed while they answer, between updates on one rollout, and while they save."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run(command(tmp_path, "whole", 0.0), env=environment, check=True, capture_output=True)
    rng, kills, parts = random.Random(5), [], tmp_path / "parts"
    for attempt in range(40):
        process = subprocess.Popen(
            command(tmp_path, "parts", 0.3 if len(kills) < KILLS else 0.0),
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        begun, saving = latest_iteration(parts) if parts.exists() else None, attempt % 3 == 2
        deadline = None
        while process.poll() is None and len(kills) < KILLS:
            now = latest_iteration(parts) if parts.exists() else None
            # A checkpoint that is being written has a folder that is not yet the latest.
            writes = any(parts.glob("iter_*")) and len([*parts.glob("*iter_*")]) > (now or 0)
            if now != begun and deadline is None:
                deadline = time.monotonic() + rng.uniform(0.0, 0.6)
            if deadline is not None and (time.monotonic() > deadline or (saving and writes)):
                kill(process.pid)
                kills.append((now, saving and writes))
                break
            time.sleep(0.002)
        process.wait()
        if process.returncode == 0:  # it has reached its end
            break
    assert process.returncode == 0
    assert kills
    assert latest_iteration(parts) == latest_iteration(tmp_path / "whole") == STEPS
    assert curve(tmp_path / "parts.jsonl") == curve(tmp_path / "whole.jsonl")
    a, b = tensors(tmp_path / "whole"), tensors(parts)
    assert a.keys() == b.keys()
    # Generators of other libraries, which nothing draws from, are seeded by the system in each process.
    assert all(torch.equal(a[name], b[name]) for name in a if "/rng[" not in name)


LEARNS = {
    "policy": {"group_size": 8},
    "batch": {"global_batch_size": 64, "micro_batch_size": 32},
    "optimizer": {"lr": 2e-2, "lr_warmup_iters": 0, "weight_decay": 0.0, "lr_decay_style": "constant"},
}
FIVE = {
    "1": Layout(shape="llama", experts="top2"),
    "T2": Layout(shape="llama", experts="top2", tp=2),
    "P2": Layout(shape="llama", experts="top2", pp=2),
    "D2": Layout(shape="llama", experts="top2", dp=2),
    "EP2": Layout(shape="llama", experts="top2", dp=2, ep=2),
}


def test_the_toy_learns_alike_on_five_layouts(tmp_path):
    """Section 8 of the reference: a vocabulary of 16, and the share of a token as the reward."""
    rewards = {
        name: [row["reward"] for row in train(layout, tmp_path, 10, LEARNS)] for name, layout in FIVE.items()
    }
    (Path(os.environ.get("MEGAZERO_TOY_CURVES") or tmp_path / "curves.json")).write_text(json.dumps(rewards))
    for name, curve_of in rewards.items():
        print(name, [round(x, 4) for x in curve_of])
        assert curve_of[0] < 0.2
        assert max(curve_of[-3:]) > 0.9, name
        assert curve_of == rewards["1"], name
