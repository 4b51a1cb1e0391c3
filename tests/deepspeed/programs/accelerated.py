"""accelerate's loop with a DeepSpeedPlugin: ``accelerated.py OUT`` writes what each case of it observes."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DeepSpeedPlugin, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DummyOptim, DummyScheduler
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tests.deepspeed.programs.tiny import Tokens, llama

AUTO = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": 2,
    "gradient_clipping": "auto",
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_gather_16bit_weights_on_model_save": "auto",
    },
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": dict.fromkeys(
            ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto"
        ),
    },
}


def train(plugin: DeepSpeedPlugin, after: Callable[[Any, Any], Any] = lambda accelerator, model: None) -> Any:
    """The documented loop: prepare, accumulate, backward, clip, step; then `after`."""
    AcceleratorState._reset_state(reset_partial_state=False)
    accelerator = Accelerator(deepspeed_plugin=plugin, gradient_accumulation_steps=2)
    model = llama()
    sections = plugin.deepspeed_config
    if "optimizer" in sections:
        optimizer = DummyOptim(model.parameters(), lr=5e-3, weight_decay=0.1)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.1)
    if "scheduler" in sections:
        schedule: Any = DummyScheduler(optimizer, total_num_steps=8, warmup_num_steps=2)
    else:
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    loader = DataLoader(Tokens(12), batch_size=2)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    losses, norms = [], []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
                norms.append(None if norm is None else float(norm))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    rate = schedule.get_last_lr()[0]
    return {"losses": losses, "norms": norms, "rate": rate, "after": after(accelerator, model)}


def state_sum(accelerator: Any, model: Any) -> dict[str, Any]:
    """What `get_state_dict` gathers."""
    try:
        state = accelerator.get_state_dict(model)
    except ValueError as error:
        return {"refused": str(error)[:60]}
    return {"names": len(state), "sum": sum(float(value.double().abs().sum()) for value in state.values())}


def save_and_load(accelerator: Any, model: Any) -> list[float]:
    """The loss after a step, and after the same step from the state that was saved before it."""
    found = []
    folder = [tempfile.mkdtemp()]
    if accelerator.num_processes > 1:
        torch.distributed.broadcast_object_list(folder)
    accelerator.save_state(folder[0])
    words = Tokens(2, seed=9).rows
    for attempt in range(2):
        if attempt:
            accelerator.load_state(folder[0])
        for _ in range(2):
            loss = model(input_ids=words, labels=words).loss
            accelerator.backward(loss)
        found.append(float(model(input_ids=words, labels=words).loss))
    return found


def cases() -> dict[str, Callable[[], Any]]:
    """Name -> what to do."""
    found: dict[str, Callable[[], Any]] = {}
    for stage in range(4):
        found[f"stage{stage}"] = lambda stage=stage: train(
            DeepSpeedPlugin(zero_stage=stage, gradient_accumulation_steps=2), state_sum
        )
        found[f"stage{stage}-saved"] = lambda stage=stage: train(
            DeepSpeedPlugin(zero_stage=stage, gradient_accumulation_steps=2), save_and_load
        )
    found["stage3-gathered"] = lambda: train(
        DeepSpeedPlugin(zero_stage=3, gradient_accumulation_steps=2, zero3_save_16bit_model=True), state_sum
    )
    found["stage3-auto"] = lambda: train(
        DeepSpeedPlugin(hf_ds_config=json.loads(json.dumps(AUTO)), zero3_init_flag=False), state_sum
    )
    for stage in (1, 2, 3):
        found[f"stage{stage}-offload"] = lambda stage=stage: train(
            DeepSpeedPlugin(
                zero_stage=stage,
                gradient_accumulation_steps=2,
                offload_optimizer_device="cpu",
                offload_param_device="cpu" if stage == 3 else "none",
                gradient_clipping=0.5,
            )
        )
    return found


def main() -> None:
    """Run all cases."""
    torch.set_num_threads(1)
    PartialState(cpu=not torch.cuda.is_available())  # without it accelerate counts one process on a CPU
    found = {}
    for name, run in cases().items():
        try:
            found[name] = run()
        except Exception as error:
            if "DEBUG" in os.environ:
                raise
            found[name] = {"error": f"{type(error).__name__}: {error}"}
        if os.environ.get("RANK", "0") == "0":
            Path(sys.argv[1]).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
