"""Advantages and losses of policy gradients against verl's own functions, on random tensors, with gradients.

    python proofs/verl_policy.py --python /path/to/a/venv/with/verl/bin/python

verl runs in its own Python: `compute_grpo_outcome_advantage`, `compute_rloo_outcome_advantage`, the losses
`vanilla` and `gspo` with each aggregation, and `kl_penalty_forward`. It needs omegaconf, tensordict and ray.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megazero.mpu.solo_group import SoloGroup  # noqa: E402
from megazero.post_training.policy.methods import Method, advantages, divergence  # noqa: E402
from megazero.post_training.policy.objective import LOSS, PolicyObjective  # noqa: E402
from proofs.trl_policy import LONGEST, batch_of, tensors  # noqa: E402

GROUP = 4
THEIRS = """
import sys, types
import numpy as np, torch
class Settings(types.SimpleNamespace):
    def get(self, name, default=None):
        return getattr(self, name, default)
# Of verl's settings of workers, whose modules import its engines, only this class is asked for.
sys.modules["verl.workers.config"] = types.SimpleNamespace(ActorConfig=Settings)
from verl.trainer.ppo import core_algos as verl
given = {k: torch.from_numpy(v) for k, v in np.load(sys.argv[1]).items()}
mask, results = given["mask"], {}
config = Settings(clip_ratio=0.2, clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_c=3.0,
                  global_batch_info={"loss_scale_factor": mask.shape[1]})
for kind in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"):
    for level, name in (("token", "vanilla"), ("sequence", "gspo")):
        loss_of = getattr(verl, "compute_policy_loss_" + name)
        logs = given["new"].clone().requires_grad_()
        signs = given["advantages"][:, None].expand_as(logs)
        loss, _ = loss_of(given["old"], logs, signs, mask, loss_agg_mode=kind, config=config)
        loss.backward()
        results[f"loss {level} {kind}"] = loss.detach().numpy()
        results[f"gradient {level} {kind}"] = logs.grad.numpy()
rewards = torch.zeros_like(mask)
rewards[:, 0] = given["advantages"]
index = np.arange(len(mask)) // int(given["group"])
for name in ("grpo", "rloo"):
    compute = getattr(verl, f"compute_{name}_outcome_advantage")
    results[name] = compute(rewards.clone(), torch.ones_like(mask), index)[0][:, 0].numpy()
for name in ("k1", "k2", "k3"):
    results[name] = verl.kl_penalty_forward(given["new"], given["reference"], name).numpy()
np.savez(sys.argv[2], **results)
"""


def main() -> int:
    """Compare on three draws; return 1 if something differs by more than 1e-6 of it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--python", required=True, help="a Python that has verl")
    python, worst = parser.parse_args().python, 0.0
    for seed in range(3):
        given = {**tensors(seed), "group": np.array(GROUP)}
        with tempfile.TemporaryDirectory() as folder:
            source, result = Path(folder) / "given.npz", Path(folder) / "theirs.npz"
            np.savez(source, **given)
            subprocess.run([python, "-c", THEIRS, str(source), str(result)], check=True)
            with np.load(result) as stored:
                theirs = dict(stored)
        groups = given["advantages"].reshape(-1, GROUP)
        std = groups.std(1, ddof=1)[:, None]
        d = torch.from_numpy(given["new"] - given["reference"])
        ours = {
            "grpo": advantages(groups, "group-std") * (std + 1e-4) / (std + 1e-6),
            "rloo": advantages(groups, "leave-one-out"),
            **{name: divergence(name, d).numpy() for name in ("k1", "k2", "k3")},
        }
        for name in (name for name in theirs if name.startswith("loss ")):
            _, level, kind = name.split()
            # gspo has no dual clip in verl.
            clip = 3.0 if level == "token" else None
            method = Method("group-std", level, 0.2, 0.28, kind, dual_clip=clip)  # type: ignore[arg-type]
            batch, logs = batch_of(given), torch.from_numpy(given["new"]).clone().requires_grad_()
            objective = PolicyObjective(method, longest=LONGEST)
            total = objective(logs.t(), batch, SoloGroup("cp", 0))[LOSS]
            loss = total / batch.divisors[objective.terms[0].over]
            (gradient,) = torch.autograd.grad(loss, logs)
            ours[name], ours[f"gradient {level} {kind}"] = loss.detach().numpy(), gradient.numpy()
        for name, array in theirs.items():
            apart = float(
                np.abs(np.ravel(array) - np.ravel(ours[name])).max() / max(1.0, np.abs(array).max())
            )
            worst = max(worst, apart)
            print(f"{seed} {name:45} apart {apart:.1e}")
    print(f"largest difference: {worst:.1e}")
    return int(worst > 1e-6)


if __name__ == "__main__":
    sys.exit(main())
