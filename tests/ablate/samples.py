"""Folders of tiny configurations, and a trainer that only writes metrics."""

from __future__ import annotations

import sys
from pathlib import Path

from megazero.ablate.trial import Trial

BASE = """\
# What all members share
model: {num_layers: 1, hidden_size: 8, num_attention_heads: 2, seq_length: 8}
batch: {micro_batch_size: 2}
optimizer: {lr: 0.01}
tokenizer: {tokenizer_type: ByteLevelTokenizer}
data: {mock_data: true, num_workers: 0}
training: {train_iters: 4, eval_interval: 2, eval_iters: 1}
"""

# Writes the metrics that a training of 4 steps would, from the step after those that are there. Its
# configuration tells it to be slow or to fail by its learning rate.
TRAINER = """
import json, os, sys, time, yaml

config = yaml.safe_load(open(sys.argv[1]))
path, rate = config["logging"]["metrics_jsonl"], config["optimizer"]["lr"]
print("learning rate", rate, flush=True)
done = len(open(path).readlines()) if os.path.exists(path) else 0
print("starts after step", done, flush=True)
for step in range(done + 1, 5):
    if rate == 13 and step == 3:
        sys.exit("a number is unlucky")
    with open(path, "a") as file:
        file.write(json.dumps({"iteration": step, "seconds": 0.5, "tflops": 2.0}) + "\\n")
    if step % 2 == 0:
        loss = rate + config["training"]["seed"] / 1e4 + 4 - step
        record = {"iteration": step, "split": "validation", "lm_loss": loss, "consumed_tokens": 16 * step}
        with open(path.replace(".jsonl", ".eval.jsonl"), "a") as file:
            file.write(json.dumps(record) + "\\n")
    if rate == 7 and step == 2 and done == 0:
        time.sleep(60)
"""


def write_study(folder: Path, **members: str) -> Path:
    """A folder with `base.yaml` and these members; an underscore in a name stands for a dash."""
    folder.mkdir(exist_ok=True)
    (folder / "base.yaml").write_text(BASE, encoding="utf-8")
    for name, text in members.items():
        (folder / f"{name.replace('_', '-')}.yaml").write_text(f"base: base.yaml\n{text}", encoding="utf-8")
    return folder


def quick_trainer(folder: Path):
    """The command of a trainer that only writes metrics; its script is put into `folder`."""
    script = folder / "trainer.py"
    script.write_text(TRAINER, encoding="utf-8")

    def command(trial: Trial) -> list[str]:
        return [sys.executable, str(script), str(trial.settings)]

    return command
