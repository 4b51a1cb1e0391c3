"""One model up the ladder of ZeRO and offload: every rung has the same losses."""

import deepspeed
import torch
from torch import nn

HOST = {"device": "cpu"}
RUNGS = {
    "plain": {"stage": 0},
    "optimizer": {"stage": 1},
    "gradients": {"stage": 2},
    "optimizer on the host": {"stage": 2, "offload_optimizer": HOST},
    "weights": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "all on the host": {"stage": 3, "offload_optimizer": HOST, "offload_param": HOST},
}


def climb(zero):
    """The losses on one rung."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4))
    config = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 1.0,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1, "torch_adam": True}},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    x, labels = torch.randn(4, 16), torch.arange(4)
    losses = []
    for _ in range(12):
        loss = nn.functional.cross_entropy(engine(x), labels)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.destroy()
    return losses


def main():
    rungs = {name: climb(zero) for name, zero in RUNGS.items()}
    plain = rungs["plain"]
    for name, losses in rungs.items():
        far = max(abs(own - other) for own, other in zip(losses, plain, strict=True))
        assert far < 1e-5, (name, far)
    print("losses:", plain)


if __name__ == "__main__":
    main()
