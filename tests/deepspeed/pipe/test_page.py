"""The page on pipelines, and the example beside it, do what they say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import megazero
from tests.forks import run_ranks

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs/deepspeed/pipe.md"


def test_the_examples_of_the_page_run(tmp_path):
    def batches():
        while True:
            yield tuple(torch.randint(0, 100, (2, 2, 3)))

    names = {"torch": torch, "nn": nn, "F": F, "megazero": megazero, "folder": tmp_path, "batches": batches()}
    names["config"] = {
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
    }
    for block in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL):
        exec(block, names)
    assert names["loss"].isfinite()
    names["model"].save_state_dict(tmp_path)
    names["model"].load_state_dir(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "layer_00-model_states.pt",
        "layer_01-model_states.pt",
    ]


START = """
import runpy, sys
from megazero.deepspeed.surface import install
install()
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def losses(ranks: int, *arguments: str) -> list[float]:
    """What the example prints on so many ranks."""
    command = ["-c", START, str(ROOT / "examples_3d/deepspeed_pipeline.py"), "--steps", "3", *arguments]
    done = run_ranks(*[command] * ranks)[0]
    assert done.returncode == 0, done.stderr
    return [float(found) for found in re.findall(r"loss (\S+)$", done.stdout, re.MULTILINE)]


@pytest.mark.slow
def test_the_example_gives_the_same_losses_on_stages(tmp_path):
    one = losses(1)
    assert len(one) == 4
    assert losses(2, "--stages", "2", "--zero", "3") == pytest.approx(one, rel=3e-7)
