"""Lightning's Trainer with its DeepSpeedStrategy: ``lightning_fit.py OUT`` writes each case's losses.

The strategy asks for Lightning's accelerator of CUDA. A stand-in for it gives out the CPU; nothing else is
replaced, and `deepspeed` is what is installed, or what ``megazero run`` puts there.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.accelerators.cuda import CUDAAccelerator
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.strategies.deepspeed import _DEEPSPEED_AVAILABLE
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tests.deepspeed.programs.tiny import Tokens, llama


class CpuForCuda(CUDAAccelerator):
    """Lightning's accelerator of CUDA, which hands out the CPU."""

    def setup_device(self, device: torch.device) -> None:
        """There is nothing to choose."""

    def setup(self, trainer: Any) -> None:
        """There is no cache to empty."""

    def teardown(self) -> None:
        """Nor at the end."""

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        """The CPU counts nothing."""
        return {}

    @staticmethod
    def parse_devices(devices: Any) -> list[int]:
        return list(range(int(devices)))

    @staticmethod
    def get_parallel_devices(devices: list[int]) -> list[torch.device]:
        return [torch.device("cpu", index) for index in devices]

    @staticmethod
    def auto_device_count() -> int:
        return 1

    @staticmethod
    def is_available() -> bool:
        return True


class Task(lightning.LightningModule):
    """A language model, as Lightning's documentation writes one."""

    def __init__(self) -> None:
        super().__init__()
        self.model = llama()
        self.losses: list[float] = []
        self.evaluated: list[float] = []

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = self.model(**batch).loss
        self.losses.append(float(loss.detach()))
        return loss

    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        self.evaluated.append(float(self.model(**batch).loss))

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=5e-3, weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def trainer(stage: int, precision: str, folder: str, steps: int) -> lightning.Trainer:
    """A Trainer of so many optimizer steps, of two micro-batches each."""
    strategy = DeepSpeedStrategy(
        stage=stage, process_group_backend="gloo", logging_batch_size_per_gpu=2, allgather_bucket_size=2**16
    )
    return lightning.Trainer(
        accelerator=CpuForCuda(),
        strategy=strategy,
        devices=int(os.environ.get("WORLD_SIZE", "1")),
        precision=precision,  # type: ignore[arg-type]
        max_steps=steps,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )


def fit(stage: int, precision: str) -> dict[str, Any]:
    """Losses of a training, of its validation, and of one that goes on from its checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        task, rows = Task(), DataLoader(Tokens(16), batch_size=2)
        kept = DataLoader(Tokens(4, seed=6), batch_size=2)
        first = trainer(stage, precision, folder, 4)
        first.fit(task, rows, kept)
        first.save_checkpoint(f"{folder}/middle.ckpt")
        again = Task()
        more = trainer(stage, precision, folder, 6)
        more.fit(again, rows, kept, ckpt_path=f"{folder}/middle.ckpt")
    return {"losses": task.losses, "evaluated": task.evaluated, "resumed": again.losses}


def main() -> None:
    """Run all cases."""
    assert _DEEPSPEED_AVAILABLE, "Lightning must see a deepspeed"
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for stage in range(4):
        for precision in ("32-true", "bf16-mixed", "bf16-true"):
            try:
                found[f"stage{stage}-{precision}"] = fit(stage, precision)
            except Exception as error:
                if "DEBUG" in os.environ:
                    raise
                found[f"stage{stage}-{precision}"] = {"error": f"{type(error).__name__}: {error}"}
    Path(sys.argv[1]).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
