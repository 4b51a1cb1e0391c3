"""A CNN on images, in the style of DeepSpeed's CIFAR tutorial: arguments, a dataset, evaluation."""

import argparse

import deepspeed
import torch
import torch.nn.functional as F
from deepspeed.accelerator import get_accelerator
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--stage", type=int, default=0, choices=[0, 1, 2, 3])
parser.add_argument("--dtype", default="fp32", choices=["fp32", "bf16"])
parser.add_argument("--local_rank", type=int, default=-1)
parser = deepspeed.add_config_arguments(parser)


class Net(nn.Module):
    """Two convolutions, two linear layers."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 8, 3)
        self.hidden, self.out = nn.Linear(8 * 2 * 2, 16), nn.Linear(16, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.first(x)), 2)
        x = F.max_pool2d(F.relu(self.second(x)), 2)
        return self.out(F.relu(self.hidden(torch.flatten(x, 1))))


def images(count):
    """Noise with a brighter channel for each third of the classes, and the classes."""
    draw = torch.Generator().manual_seed(1)
    labels = torch.randint(10, (count,), generator=draw)
    x = torch.randn(count, 3, 16, 16, generator=draw)
    x[torch.arange(count), labels % 3] += 1 + (labels // 3)[:, None, None]
    return torch.utils.data.TensorDataset(x, labels)


def main():
    args = parser.parse_args()
    deepspeed.init_distributed()
    get_accelerator().set_device(max(args.local_rank, 0))
    torch.manual_seed(0)
    net, data = Net(), images(64)
    config = {
        "train_batch_size": 16,
        "optimizer": {"type": "Adam", "params": {"lr": 0.01, "betas": [0.8, 0.999], "weight_decay": 3e-7}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 3}},
        "gradient_clipping": 1.0,
        "bf16": {"enabled": args.dtype == "bf16"},
        "wall_clock_breakdown": False,
        "zero_optimization": {"stage": args.stage, "allgather_partitions": True, "overlap_comm": True},
    }
    engine, _, loader, _ = deepspeed.initialize(
        args=args, model=net, model_parameters=net.parameters(), training_data=data, config=config
    )
    device, kind = get_accelerator().device_name(engine.local_rank), next(net.parameters()).dtype
    criterion, losses = nn.CrossEntropyLoss(), []
    for _ in range(args.epochs):
        for x, labels in loader:
            loss = criterion(engine(x.to(device).to(kind)), labels.to(device))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    engine.eval()
    with torch.no_grad():
        right = sum((engine(x[None].to(device).to(kind)).argmax() == label).item() for x, label in data)
    print("right:", right, "losses:", losses)


if __name__ == "__main__":
    main()
