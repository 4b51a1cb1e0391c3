"""Token losses of policy gradients against TRL's own code, on random log-probabilities, with gradients.

    python proofs/trl_policy.py --python /path/to/a/venv/with/trl/bin/python

TRL runs in its own Python: `GRPOTrainer._compute_loss` and `RLOOTrainer._compute_loss`, with given
log-probabilities instead of a model's.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from megazero.models.objective import AnswerBatch
from megazero.models.targets import Targets
from megazero.mpu.solo_group import SoloGroup
from megazero.post_training.policy.methods import METHODS, Method
from megazero.post_training.policy.objective import ANSWERS, KL, LOSS, PER_ROW, TOKENS, PolicyObjective

LONGEST, ANSWERS_OF_A_STEP = 12, 8
THEIRS = """
import sys, types
from collections import defaultdict
import numpy as np, torch
from trl import GRPOTrainer, RLOOTrainer
given = {k: torch.from_numpy(v) for k, v in np.load(sys.argv[1]).items()}
class Accelerator:
    num_processes = 1
    sync_gradients = True
    def gather(self, x): return x
    def gather_for_metrics(self, x): return x
    def reduce(self, x, reduction=None): return x
class Stub:
    def __getattr__(self, name): return None
def loss_of(kind, level, low, high, beta):
    logs = given["new"].clone().requires_grad_()
    stub = Stub()
    stub.args = types.SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1)
    stub.accelerator, stub._metrics = Accelerator(), {"train": defaultdict(list)}
    stub.model = types.SimpleNamespace(training=True)
    stub.top_entropy_quantile, stub.beta, stub.loss_type = 1.0, beta, kind
    stub.importance_sampling_level, stub.epsilon_low, stub.epsilon_high = level, low, high
    stub.current_gradient_accumulation_steps, stub.max_completion_length = 1, int(given["longest"])
    stub.use_vllm = stub.aux_loss_enabled = stub._entropy_bonus_enabled = False
    stub.num_iterations = 2
    entropies = torch.zeros_like(given["new"])
    stub._get_per_token_logps_and_entropies = lambda *a, **k: (logs, entropies, None)
    ids = torch.ones_like(given["mask"]).long()
    inputs = dict(prompt_ids=ids[:, :1], prompt_mask=ids[:, :1], completion_ids=ids,
                  completion_mask=given["mask"], advantages=given["advantages"],
                  old_per_token_logps=given["old"], old_logps=(given["old"] * given["mask"]).sum(1),
                  ref_per_token_logps=given["reference"], num_items_in_batch=given["mask"].sum())
    trainer = RLOOTrainer if kind == "rloo" else GRPOTrainer
    loss = trainer._compute_loss(stub, None, inputs)
    loss.backward()
    return loss.detach(), logs.grad
results = {}
for line in sys.argv[3:]:
    kind, level, low, high, beta = line.split(",")
    loss, gradient = loss_of(kind, level, float(low), float(high), float(beta))
    results["loss " + line], results["gradient " + line] = loss.numpy(), gradient.numpy()
np.savez(sys.argv[2], **results)
"""
ROWS: list[tuple[str, Method, float]] = [
    ("grpo", METHODS["grpo"], 0.0),
    ("grpo", METHODS["grpo"], 0.04),
    ("dr_grpo", METHODS["dr-grpo"], 0.0),
    ("dapo", METHODS["dapo"], 0.0),
    ("dapo", METHODS["dapo"], 0.04),
    ("grpo", METHODS["gspo"], 0.0),
    ("dapo", replace(METHODS["gspo"], aggregation="token-mean"), 0.0),
    ("rloo", METHODS["rloo"], 0.0),
]
"""TRL's loss_type, our method, and the coefficient of k3."""


def tensors(seed: int) -> dict[str, np.ndarray]:
    """Random answers: log-probabilities new, old and of the reference, which tokens there are, advantages."""
    rng = np.random.default_rng(seed)
    shape = (ANSWERS_OF_A_STEP, LONGEST)
    old = -rng.exponential(1.5, shape)
    lengths = rng.integers(1, LONGEST + 1, ANSWERS_OF_A_STEP)
    return {
        "old": old,
        "new": old + rng.normal(0, 0.3, shape),
        "reference": old + rng.normal(0, 0.3, shape),
        "mask": (np.arange(LONGEST) < lengths[:, None]).astype(np.float64),
        "advantages": rng.normal(0, 1, ANSWERS_OF_A_STEP),
        "longest": np.array(LONGEST),
    }


def batch_of(given: dict[str, np.ndarray]) -> AnswerBatch:
    """These answers as a micro-batch of ours."""
    values = {name: torch.from_numpy(np.asarray(array)) for name, array in given.items()}
    mask = values["mask"]
    return AnswerBatch(
        torch.zeros(mask.shape, dtype=torch.int64),
        Targets(torch.zeros(mask.shape, dtype=torch.int64), mask, float(mask.sum())),
        given={
            **{name: torch.zeros(len(mask)) for name, _ in PER_ROW},
            "answered": mask,
            "logs": values["old"],
            "reference": values["reference"],
            "answer_length": mask.sum(1),
            "advantages": values["advantages"],
        },
        divisors={ANSWERS: float(len(mask)), TOKENS: float(mask.sum())},
    )


def ours(given: dict[str, np.ndarray], method: Method, beta: float) -> tuple[float, np.ndarray]:
    """Our loss of the step, and its gradient by the new log-probabilities."""
    batch, logs = batch_of(given), torch.from_numpy(given["new"]).clone().requires_grad_()
    objective = PolicyObjective(method, longest=LONGEST, estimator="k3" if beta else None, kl_coef=beta)
    terms = objective(logs.t(), batch, SoloGroup("cp", 0))
    total = torch.zeros((), dtype=torch.float64)
    for term in objective.terms:
        if term.name in (LOSS, KL):
            total = total + term.coefficient * terms[term.name] / batch.divisors[term.over]
    (gradient,) = torch.autograd.grad(total, logs)
    return float(total), gradient.numpy()


def main() -> int:
    """Compare all rows on three draws; return 1 if one differs by more than 1e-9."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--python", required=True, help="a Python that has trl")
    python, worst = parser.parse_args().python, 0.0
    names = {row: ",".join((row[0], row[1].ratio_level.removesuffix("-sum"), *map(str, (
        row[1].clip_low, row[1].clip_high, row[2])))) for row in ROWS}  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(3):
            given, source, result = tensors(seed), Path(folder) / "given.npz", Path(folder) / "theirs.npz"
            np.savez(source, **given)
            command = [python, "-c", THEIRS, str(source), str(result), *dict.fromkeys(names.values())]
            subprocess.run(command, check=True)
            with np.load(result) as theirs:
                for row, name in names.items():
                    loss, gradient = ours(given, row[1], row[2])
                    gap = abs(loss - float(theirs[f"loss {name}"]))
                    apart = float(np.abs(gradient - theirs[f"gradient {name}"]).max())
                    worst = max(worst, gap, apart)
                    print(f"{seed} {name:40} loss {loss:+.9f}  apart {gap:.1e}  gradients apart {apart:.1e}")
    print(f"largest difference: {worst:.1e}")
    return int(worst > 1e-9)


if __name__ == "__main__":
    sys.exit(main())
