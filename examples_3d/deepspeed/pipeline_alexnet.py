"""A CNN as a pipeline of plain layers, in the style of DeepSpeed's pipeline tutorial."""

import argparse

import deepspeed
import torch
from deepspeed.pipe import PipelineModule
from deepspeed.utils import RepeatingLoader
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--steps", type=int, default=8)
parser.add_argument("--pipeline-parallel-size", type=int, default=2)
parser = deepspeed.add_config_arguments(parser)
CONFIG = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "Adam", "params": {"lr": 0.01, "betas": [0.9, 0.999], "eps": 1e-8}},
    "steps_per_print": 10,
    "wall_clock_breakdown": False,
}


def layers():
    """Convolutions, a change of shape, linear layers."""
    return [
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(4),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d((2, 2)),
        lambda x: torch.flatten(x, 1),
        nn.Linear(32, 32),
        nn.ReLU(inplace=True),
        nn.Linear(32, 10),
    ]


def images():
    """Noise whose brightest channel tells the class."""
    draw = torch.Generator().manual_seed(1)
    labels = torch.randint(3, (32,), generator=draw)
    x = torch.randn(32, 3, 8, 8, generator=draw)
    x[torch.arange(32), labels] += 2
    return torch.utils.data.TensorDataset(x, labels)


if __name__ == "__main__":
    args = parser.parse_args()
    deepspeed.init_distributed()
    deepspeed.runtime.utils.set_random_seed(7)
    net = PipelineModule(
        layers=layers(),
        loss_fn=nn.CrossEntropyLoss(),
        num_stages=args.pipeline_parallel_size,
        partition_method="parameters",
        activation_checkpoint_interval=0,
    )
    engine, _, _, _ = deepspeed.initialize(
        args=args,
        model=net,
        model_parameters=[p for p in net.parameters() if p.requires_grad],
        config=CONFIG,
    )
    loader = torch.utils.data.DataLoader(images(), batch_size=engine.train_micro_batch_size_per_gpu())
    data = iter(RepeatingLoader(loader))
    losses = [float(engine.train_batch(data_iter=data)) for _ in range(args.steps)]
    if engine.global_rank == 0:
        print("losses:", losses)
