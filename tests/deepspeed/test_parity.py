"""Held against DeepSpeed itself where it is installed: one script run with both."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from tests.forks import run, run_ranks

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples_3d/deepspeed_script.py"
JSON = ROOT / "examples_3d/ds_config_zero3.json"
needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="needs the deepspeed package"
)


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
