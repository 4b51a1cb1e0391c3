"""trl's trainers under a DeepSpeed JSON: ``preferences.py FOLDER sft|dpo|grpo|rloo STAGE``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tests.deepspeed.programs.small_model import prepare


def rewarded(completions: list[str], **rest: Any) -> list[float]:
    """A number for each text that the model has written between two steps."""
    return [float(sum(map(ord, text)) % 17) for text in completions]


if __name__ == "__main__":
    folder, task, stage = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    prepare(folder, stage)
    common = {
        "output_dir": str(folder / "out"),
        "max_steps": 6,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 5e-3,
        "logging_steps": 1,
        "save_steps": 3,
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "disable_tqdm": True,
        "seed": 3,
        "deepspeed": str(folder / "ds.json"),
    }
    rows = [[f"w{5 + i} w{6 + i} ", f"w{7 + i} w{8 + i}", f"w{i % 7 + 40} w9"] for i in range(24)]
    if task == "sft":
        args = trl.SFTConfig(**common, max_length=16)
        data = Dataset.from_list([{"text": prompt + chosen} for prompt, chosen, _ in rows])
    elif task in ("grpo", "rloo"):
        kind = trl.GRPOConfig if task == "grpo" else trl.RLOOConfig
        written = {"num_generations": 2, "max_completion_length": 6, "beta": 0.1}
        args = kind(**{**common, "max_steps": 3, "learning_rate": 1e-3}, **written)
        data = Dataset.from_list([{"prompt": prompt} for prompt, *_ in rows])
    else:
        args = trl.DPOConfig(**common, max_length=16)
        data = Dataset.from_list(
            [{"prompt": prompt, "chosen": chosen, "rejected": worse} for prompt, chosen, worse in rows]
        )
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    rewards = {"reward_funcs": rewarded} if task in ("grpo", "rloo") else {}
    trainer_kind = getattr(trl, f"{task.upper()}Trainer")
    trainer = trainer_kind(model=model, args=args, train_dataset=data, processing_class=tokenizer, **rewards)
    trainer.train()
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    found = {
        "losses": [float(entry["loss"]) for entry in history],
        "norms": [float(entry["grad_norm"]) for entry in history],
        "rewards": [float(entry.get("reward", 0.0)) for entry in history],
        "saved": sorted(p.name for p in (folder / "out").iterdir()),
    }
    (folder / "found.json").write_text(json.dumps(found))
