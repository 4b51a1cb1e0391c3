"""What a step costs through `megazero.initialize`, beside the same model in a plain torch loop.

    python benchmarks/deepspeed_step.py [--rounds 30] [--stage 0]

Both train 23 million parameters on the same batch, in turns, one step each; the figure is the ratio
of the medians. `--site FOLDER` adds DeepSpeed itself from there.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

WIDTH, LAYERS, BATCH = 1024, 11, 64


def build(device: torch.device) -> nn.Module:
    """Linear layers with 23 million parameters together."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(LAYERS):
        layers += [nn.Linear(WIDTH, WIDTH, device=device), nn.GELU()]
    layers += [nn.Linear(WIDTH, 11 * WIDTH, device=device)]
    return nn.Sequential(*layers)


def plain(model: nn.Module, x: torch.Tensor) -> Callable[[], None]:
    """A step of plain torch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        model(x).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def through(package: Any, model: nn.Module, x: torch.Tensor, stage: int) -> Callable[[], None]:
    """A step through an engine."""
    config = {
        "train_batch_size": BATCH,
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    }
    engine, *_ = package.initialize(model=model, config=config, model_parameters=model.parameters())

    def step() -> None:
        engine.backward(engine(x).square().mean())
        engine.step()

    return step


def main() -> None:
    """Time and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--stage", type=int, default=0)
    parser.add_argument("--site", help="folder that holds DeepSpeed")
    args = parser.parse_args()
    for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_PORT": 29612}.items():
        os.environ.setdefault(name, str(value))
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    import megazero

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    x = torch.randn(BATCH, WIDTH, device=device)
    steps = {
        "torch": plain(build(device), x),
        "megazero": through(megazero, build(device), x, args.stage),
    }
    if args.site:
        sys.path.append(args.site)
        import deepspeed

        steps["deepspeed"] = through(deepspeed, build(device), x, args.stage)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(args.rounds + 3):
        for name, step in steps.items():
            if device.type == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            step()
            if device.type == "cuda":
                torch.cuda.synchronize()
            if number >= 3:
                seconds[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    for name, median in medians.items():
        print(f"{name:10} {1000 * median:8.2f} ms  {median / medians['torch']:.3f} x torch")


if __name__ == "__main__":
    main()
