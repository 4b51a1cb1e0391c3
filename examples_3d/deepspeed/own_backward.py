"""Plain torch's loop around an engine: `loss.backward()` by the script, autocast, torch's schedule."""

import argparse

import deepspeed
import torch
from torch import nn

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()
    deepspeed.init_distributed()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": args.stage},
        "bf16": {"enabled": True},
        "zero_allow_untested_optimizer": True,
    }
    engine, optimizer, _, _ = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=schedule, config=config
    )
    draw, losses = torch.Generator().manual_seed(8), []
    for _ in range(2 * args.steps):
        x = torch.randn(4, 8, generator=draw).to(engine.device)
        with torch.autocast(engine.device.type, dtype=torch.bfloat16):
            first, second = engine(x).unbind(-1)
            loss = (first - x.sum(-1)).square().mean() + 0.1 * (second - x[:, 0]).square().mean()
        loss.backward()
        engine.step()
        losses.append(loss.item())
    print("learning rate:", engine.get_lr(), "losses:", losses)
