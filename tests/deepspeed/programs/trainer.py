"""transformers' Trainer under a DeepSpeed JSON: ``trainer.py OUT [STAGE...]`` writes each case's losses.

Run it on DeepSpeed for the answers, and by ``megazero run`` for ours.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState
from transformers import Trainer, TrainingArguments

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tests.deepspeed.programs.tiny import Tokens, llama

OPTIMIZER = {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")}
SCHEDULER = {
    "type": "WarmupDecayLR",
    "params": dict.fromkeys(
        ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto"
    ),
}


def config(stage: int, optimizer: bool, scheduler: bool) -> dict[str, Any]:
    """A JSON as transformers' documentation has it."""
    sections = {"optimizer": OPTIMIZER} if optimizer else {}
    sections |= {"scheduler": SCHEDULER} if scheduler else {}
    zero: dict[str, Any] = {
        "stage": stage,
        "overlap_comm": False,
        "contiguous_gradients": True,
        "reduce_bucket_size": "auto",
    }
    if stage == 3:
        zero |= {
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
            "stage3_gather_16bit_weights_on_model_save": True,
        }
    return {
        **sections,
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 8},
        "zero_optimization": zero,
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "steps_per_print": 2000,
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "wall_clock_breakdown": False,
    }


class Watched(Trainer):
    """A Trainer that keeps what its model lost."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        found = super().compute_loss(*args, **kwargs)
        loss = found[0] if isinstance(found, tuple) else found
        self.__dict__.setdefault("losses", []).append(float(loss.detach()))
        return found


def arguments(folder: str, deepspeed: dict[str, Any], bf16: bool = False, **more: Any) -> TrainingArguments:
    """The arguments of a short training on the CPU."""
    chosen: dict[str, Any] = {
        "output_dir": folder,
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 5e-3,
        "weight_decay": 0.1,
        "warmup_steps": 2,
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 11,
    }
    return TrainingArguments(**{**chosen, **more}, bf16=bf16, deepspeed=deepspeed)


def losses(stage: int, optimizer: bool, scheduler: bool, bf16: bool) -> dict[str, Any]:
    """What a training logs."""
    AcceleratorState._reset_state(reset_partial_state=False)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Watched(
            model=llama(),
            args=arguments(folder, config(stage, optimizer, scheduler), bf16),
            train_dataset=Tokens(32),
            eval_dataset=Tokens(4, seed=6),
        )
        trainer.train()
        history = trainer.state.log_history
        norms = [float(entry["grad_norm"]) for entry in history if entry.get("grad_norm") is not None]
        rates = [entry["learning_rate"] for entry in history if "learning_rate" in entry]
        evaluated = trainer.evaluate()["eval_loss"]
    return {"losses": trainer.losses, "norms": norms, "rates": rates, "evaluated": evaluated}


def main() -> None:
    """Run all cases of some stages."""
    out, *stages = sys.argv[1:]
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for stage, optimizer, scheduler, bf16 in itertools.product(
        map(int, stages or "0123"), (True, False), (True, False), (False, True)
    ):
        words = (
            f"stage{stage}",
            "json_optimizer" if optimizer else "own_optimizer",
            "json_schedule" if scheduler else "own_schedule",
            "bf16" if bf16 else "fp32",
        )
        try:
            found["-".join(words)] = losses(stage, optimizer, scheduler, bf16)
        except Exception as error:
            found["-".join(words)] = {"error": f"{type(error).__name__}: {error}"}
        if os.environ.get("RANK", "0") == "0":
            Path(out).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
