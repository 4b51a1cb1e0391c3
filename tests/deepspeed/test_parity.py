"""Held against DeepSpeed itself where it is installed: its schedules, and one script run with both."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest
import torch

from megazero.config.deepspeed.extras import SchedulerExtras
from megazero.deepspeed.schedules import WarmupSchedule
from tests.forks import run, run_ranks

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples_3d/deepspeed_script.py"
JSON = ROOT / "examples_3d/ds_config_zero3.json"
needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="needs the deepspeed package"
)

SCHEDULES = [
    {"type": "WarmupLR"},
    {"type": "WarmupLR", "warmup_num_steps": 4},
    {"type": "WarmupLR", "warmup_num_steps": 1, "warmup_min_lr": 0.01, "warmup_max_lr": 0.5},
    {"type": "WarmupLR", "warmup_num_steps": 5, "warmup_type": "linear", "warmup_min_lr": 1e-4},
    {"type": "WarmupDecayLR", "total_num_steps": 12, "warmup_num_steps": 4, "warmup_max_lr": 0.2},
    {"type": "WarmupDecayLR", "total_num_steps": 3, "warmup_num_steps": 6, "warmup_max_lr": 0.2},
    {
        "type": "WarmupDecayLR",
        "total_num_steps": 9,
        "warmup_num_steps": 3,
        "warmup_type": "linear",
        "warmup_max_lr": 1e-3,
    },
    {"type": "WarmupCosineLR", "total_num_steps": 12, "warmup_num_steps": 4},
    {
        "type": "WarmupCosineLR",
        "total_num_steps": 10,
        "warmup_num_steps": 3,
        "warmup_type": "linear",
        "warmup_min_ratio": 0.2,
        "cos_min_ratio": 0.1,
    },
    {"type": "WarmupCosineLR", "total_num_steps": 2, "warmup_num_steps": 5},
]
RATES = (0.3, 0.007)  # of two parameter groups
STEPS = 16


def two_groups() -> torch.optim.Optimizer:
    weights = [torch.nn.Parameter(torch.ones(1)) for _ in RATES]
    return torch.optim.SGD(
        [{"params": [w], "lr": rate} for w, rate in zip(weights, RATES, strict=True)], lr=1
    )


def values(schedule, optimizer) -> list[list[float]]:
    """The rates of construction and after each of some steps."""
    found = [[group["lr"] for group in optimizer.param_groups]]
    for _ in range(STEPS):
        schedule.step()
        found.append([group["lr"] for group in optimizer.param_groups])
    return found


def test_values_by_hand():
    optimizer = two_groups()
    extras = SchedulerExtras("WarmupDecayLR", 6, warmup_num_steps=2, warmup_type="linear", warmup_max_lr=0.4)
    schedule = WarmupSchedule(optimizer, extras)
    first = [pair[0] for pair in values(schedule, optimizer)]
    assert first[:9] == pytest.approx([0.0, 0.0, 0.2, 0.4, 0.3, 0.2, 0.1, 0.0, 0.0])
    assert schedule.get_last_lr() == [0.0, 0.0]
    schedule.load_state_dict({"last_batch_iteration": 3})
    assert schedule.get_lr() == pytest.approx([0.3, 0.3])
    schedule.step(1)
    assert schedule.state_dict() == {"last_batch_iteration": 1}


DEEPSPEED_VALUES = """
import json, sys
from deepspeed.runtime import lr_schedules
from tests.deepspeed.test_parity import SCHEDULES, two_groups, values

found = []
for given in SCHEDULES:
    optimizer, params = two_groups(), dict(given)
    schedule = getattr(lr_schedules, params.pop("type"))(optimizer, **params)
    found.append(values(schedule, optimizer))
print("VALUES", json.dumps(found))
"""


@needs_deepspeed
def test_schedules_have_deepspeeds_values():
    done = run("-c", DEEPSPEED_VALUES, environment={"DS_ACCELERATOR": "cpu"})
    assert done.returncode == 0, done.stderr
    theirs = json.loads(done.stdout.partition("VALUES ")[2])
    for given, expected in zip(SCHEDULES, theirs, strict=True):
        optimizer = two_groups()
        schedule = WarmupSchedule(optimizer, SchedulerExtras(**given))
        assert values(schedule, optimizer) == [pytest.approx(pair, rel=1e-12) for pair in expected], given


def run_script(path: Path, *arguments: str, ranks: int = 1) -> list[float]:
    """The losses that it prints."""
    command = [path, "--deepspeed_config", JSON, *arguments]
    # DeepSpeed looks for MPI where the size of the node is missing.
    environment = {"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": ranks}
    if ranks == 1:
        (done,) = run_ranks(command, environment=environment)
    else:
        launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}")
        done = run(*launcher, *command, environment=environment)
    assert done.returncode == 0, done.stderr
    return [float(loss) for loss in re.findall(r"^step \d+ loss (\S+)$", done.stdout, re.MULTILINE)]


def test_the_example_learns_and_continues(tmp_path):
    losses = run_script(SCRIPT, "--steps", "12", "--save", str(tmp_path))
    assert len(losses) == 12
    assert losses[-1] < losses[0] - 0.5
    assert len(run_script(SCRIPT, "--steps", "14", "--load", str(tmp_path))) == 2


@pytest.mark.slow
def test_the_example_learns_on_two_ranks():
    losses = run_script(SCRIPT, "--steps", "12", ranks=2)
    assert len(losses) == 12
    assert losses[-1] < losses[0] - 0.5


@needs_deepspeed
@pytest.mark.slow
def test_the_example_prints_deepspeeds_losses(tmp_path):
    """The same script with the import changed back."""
    theirs = tmp_path / "script.py"
    text = SCRIPT.read_text(encoding="utf-8")
    assert text.count("import megazero as deepspeed") == 1
    theirs.write_text(text.replace("import megazero as deepspeed", "import deepspeed"), encoding="utf-8")
    ours, expected = run_script(SCRIPT, "--steps", "15"), run_script(theirs, "--steps", "15")
    assert len(ours) == 15
    assert ours == pytest.approx(expected, rel=1e-4)
