"""A one-cycle schedule, an optimizer of torch's by name, events in CSV files, the profiler."""

import pathlib
import tempfile

import deepspeed
import torch
from deepspeed.profiling.flops_profiler import get_model_profile
from torch import nn

if __name__ == "__main__":
    deepspeed.init_distributed()
    folder = tempfile.mkdtemp()
    config = {
        "train_batch_size": 8,
        "steps_per_print": 5,
        "optimizer": {"type": "NAdam", "params": {"lr": 1e-3}},
        "scheduler": {
            "type": "OneCycle",
            "params": {
                "cycle_min_lr": 1e-3,
                "cycle_max_lr": 2e-2,
                "cycle_first_step_size": 5,
                "cycle_momentum": False,
            },
        },
        "csv_monitor": {"enabled": True, "output_path": folder, "job_name": "cycle"},
        "zero_optimization": {"stage": 0},
    }
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    _, macs, params = get_model_profile(model, input_shape=(8, 8), print_profile=False, as_string=False)
    model.train()
    engine, _, _, schedule = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    draw, losses, rates = torch.Generator().manual_seed(8), [], []
    for _ in range(12):
        x = torch.randn(8, 8, generator=draw).to(engine.device)
        loss = (engine(x)[:, 0] - x.sum(-1)).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        rates.append(schedule.get_last_lr()[0])
    files = sorted(path.name for path in pathlib.Path(folder, "cycle").iterdir())
    print(params, "weights,", macs, "products,", files, rates, "losses:", losses)
