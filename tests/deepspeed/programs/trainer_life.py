"""A Trainer's life beyond training: ``trainer_life.py FOLDER first|again STAGE...``.

`first` trains, evaluates, saves every second step, loads the best weights, generates and saves the model.
`again` is a new process, which resumes from the middle. Each writes ``FOLDER/PHASE.json``.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState
from transformers import LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tests.deepspeed.programs.tiny import Tokens, llama
from tests.deepspeed.programs.trainer import Watched, arguments, config


def build(folder: Path, stage: int, lora: bool) -> Watched:
    """A Trainer that saves and evaluates every second step of six."""
    AcceleratorState._reset_state(reset_partial_state=False)
    args = arguments(
        str(folder),
        config(stage, optimizer=True, scheduler=True),
        max_steps=6,
        save_strategy="steps",
        save_steps=2,
        eval_strategy="steps",
        eval_steps=2,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        save_total_limit=None,
    )
    model = llama()  # after the arguments, as transformers' documentation asks for
    if lora:
        from peft import LoraConfig, get_peft_model

        adapter = LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        model = get_peft_model(model, adapter)
    return Watched(model=model, args=args, train_dataset=Tokens(48), eval_dataset=Tokens(4, seed=6))


def first(folder: Path, stage: int, lora: bool) -> dict[str, Any]:
    """Train to the end."""
    trainer = build(folder, stage, lora)
    trainer.train()
    words = torch.tensor([[5, 6, 7]])
    trainer.model.eval()
    with torch.no_grad():
        text = trainer.model.generate(
            input_ids=words, max_new_tokens=5, do_sample=False, synced_gpus=stage == 3
        )
    trainer.save_model(str(folder / "model"))
    found = {
        "losses": trainer.losses,
        "best": trainer.state.best_metric,
        "evaluated": trainer.evaluate()["eval_loss"],
        "text": text.tolist(),
        "files": sorted(path.name for path in (folder / "checkpoint-2").iterdir()),
    }
    if not lora:
        found["reloaded"] = again_by_transformers(folder / "model", words)
    return found


def again_by_transformers(folder: Path, words: torch.Tensor) -> list[Any]:
    """What the saved model generates outside of any engine."""
    from transformers.integrations import deepspeed as bridge

    bridge.unset_hf_deepspeed_config()
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.generate(input_ids=words, max_new_tokens=5, do_sample=False).tolist()


def again(folder: Path, stage: int, lora: bool) -> dict[str, Any]:
    """Resume after the second step."""
    trainer = build(folder, stage, lora)
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    return {"losses": trainer.losses, "best": trainer.state.best_metric}


def main() -> None:
    """Run one phase for some stages, with the whole model and with LoRA."""
    folder, phase, *stages = sys.argv[1:]
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for stage in map(int, stages):
        for lora in (False, True):
            case = f"stage{stage}-{'lora' if lora else 'whole'}"
            try:
                found[case] = {"first": first, "again": again}[phase](Path(folder) / case, stage, lora)
            except Exception as error:
                if "DEBUG" in os.environ:
                    raise
                found[case] = {"error": f"{type(error).__name__}: {error}"}
            if os.environ.get("RANK", "0") == "0":
                (Path(folder) / f"{phase}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
