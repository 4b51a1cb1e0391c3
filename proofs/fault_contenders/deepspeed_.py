"""A DeepSpeed engine of ZeRO stage 1."""

from __future__ import annotations

import os
from datetime import timedelta

from torch import Tensor, nn
from torch.distributed import distributed_c10d

from proofs.fault_contenders.faults import TIMEOUT, Hook, Small, Trainer, hooked


class WithDeepSpeed(Trainer):
    """The small model with AdamW."""

    def __init__(self, lr: float, seed: int):
        # The groups that DeepSpeed opens for itself have torch's limit, not that of the job: 30 minutes.
        distributed_c10d.default_pg_timeout = timedelta(seconds=TIMEOUT)
        import deepspeed

        config = {
            "train_micro_batch_size_per_gpu": 8,
            "optimizer": {"type": "AdamW", "params": {"lr": lr, "torch_adam": True}},
            "zero_optimization": {"stage": 1},
            "gradient_clipping": 1.0,
        }
        self.engine = deepspeed.initialize(model=Small(), config=config, dist_init_required=False)[0]
        self.optimizer = self.engine.optimizer

    def step(self, x: Tensor, y: Tensor, hook: Hook | None) -> float:
        loss = (hooked(self.engine(x), hook) - y).square().mean()
        self.engine.backward(loss)
        self.engine.step()
        return float(loss.detach())

    def parameters(self) -> list[nn.Parameter]:
        return list(self.engine.module.parameters())

    def moment(self) -> Tensor:
        return next(iter(self.optimizer.optimizer.state.values()))["exp_avg"]

    def save(self) -> None:
        self.engine.save_checkpoint(self.folder)


def build() -> None:
    """Compiles what DeepSpeed compiles when it is first started, which takes a minute and is no fault."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    os.dup2(2, 1)  # what the compiler says is no result
    from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

    ShareMemCommBuilder().load()
