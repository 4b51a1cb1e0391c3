"""What other trainers do in the same faults: DDP and FSDP2 of torch, and DeepSpeed where it is installed.

    python benchmarks/fault_contenders.py
    python benchmarks/fault_contenders.py --contenders ddp fsdp2 --faults nan_once died

Two Gloo ranks train a small model for 30 steps, in the loop that each library's documentation shows, with
clipping, and one thing goes wrong on rank 1. Only what a library does by itself counts. Prints lines of JSON.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import os
import signal
import socket
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

STEPS, AT = 30, 20
TIMEOUT = 8.0  # seconds that a collective may take; the libraries' defaults are 10 to 30 minutes
FAULTS = (
    "other_lr",
    "other_seed",
    "weight_bit",
    "moment_bit",
    "nan_once",
    "nan_for_good",
    "wrong_gradient_once",
    "noise",
    "nan_is_saved",
    "slow",
    "died",
    "stopped",
)


Hook = Callable[[Tensor], Tensor]


class Small(nn.Module):
    """Two layers."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)))


def _hooked(output: Tensor, hook: Hook | None) -> Tensor:
    if hook is not None:
        output.register_hook(hook)
    return output


class Plain:
    """A model under DDP or FSDP2 with AdamW."""

    def __init__(self, wrap: Callable[[nn.Module], nn.Module], lr: float):
        self.model = wrap(Small())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr)

    def step(self, x: Tensor, y: Tensor, hook: Hook | None) -> float:
        self.optimizer.zero_grad()
        loss = (_hooked(self.model(x), hook) - y).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return float(loss.detach())

    def parameters(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    def moment(self) -> Tensor:
        return next(iter(self.optimizer.state.values()))["exp_avg"]

    def save(self, folder: str) -> None:
        found = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save(found, f"{folder}/{dist.get_rank()}.pt")


class WithDeepSpeed:
    """The same under a DeepSpeed engine of ZeRO stage 1."""

    def __init__(self, lr: float):
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
        loss = (_hooked(self.engine(x), hook) - y).square().mean()
        self.engine.backward(loss)
        self.engine.step()
        return float(loss.detach())

    def parameters(self) -> list[nn.Parameter]:
        return list(self.engine.module.parameters())

    def moment(self) -> Tensor:
        return next(iter(self.optimizer.optimizer.state.values()))["exp_avg"]

    def save(self, folder: str) -> None:
        self.engine.save_checkpoint(folder)


def _local(tensor: Tensor) -> Tensor:
    return getattr(tensor, "_local_tensor", tensor)


def _build(name: str, lr: float) -> Plain | WithDeepSpeed:
    if name == "deepspeed":
        return WithDeepSpeed(lr)
    if name == "ddp":
        return Plain(nn.parallel.DistributedDataParallel, lr)
    from torch.distributed.fsdp import fully_shard

    def shard(model: nn.Module) -> nn.Module:
        for layer in (model.first, model.second):
            fully_shard(layer)
        return fully_shard(model)

    return Plain(shard, lr)


def _break(trainer: Plain | WithDeepSpeed, fault: str, step: int, folder: str) -> None:
    """What goes wrong on rank 1 before a step."""
    weight = trainer.parameters()[0]
    if fault == "weight_bit" and step == AT:
        bits = _local(weight.data).view(-1)[:1].view(torch.int32)
        bits ^= 1 << 20
    elif fault == "moment_bit" and step == AT:
        bits = _local(trainer.moment()).view(-1)[:1].view(torch.int32)
        bits ^= 1 << 20
    elif fault == "nan_is_saved" and step == STEPS - 1:
        _local(trainer.moment()).view(-1)[0] = torch.nan
    elif fault == "slow":
        time.sleep(0.1)
    elif fault == "died" and step == AT:
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "stopped" and step == AT:
        os.kill(os.getpid(), signal.SIGSTOP)


def _wrong_gradient(fault: str, now: list[int]) -> Callable[[Tensor], Tensor]:
    """What a faulty rank makes of the gradient of the model's output."""

    def wrong(gradient: Tensor) -> Tensor:
        if fault == "wrong_gradient_once" and now[0] == AT:
            return gradient * 2.0**20
        if (fault == "nan_once" and now[0] == AT) or (fault == "nan_for_good" and now[0] >= AT):
            return gradient * torch.nan
        return gradient

    return wrong


def rank(number: int, port: int, name: str, fault: str, folder: str) -> None:
    """One rank's training."""
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(number),
        "LOCAL_RANK": str(number),
        "WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
    }
    output = os.open(f"{folder}/said{number}", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT))
    faulty, now = number == 1, [0]
    torch.manual_seed(8 if faulty and fault == "other_seed" else 7)
    trainer = _build(name, 2e-2 if faulty and fault == "other_lr" else 1e-2)
    hook = _wrong_gradient(fault, now) if faulty else None
    draw = torch.Generator().manual_seed(100 + number)
    for step in range(STEPS):
        now[0] = step
        x = torch.randn(8, 16, generator=draw)
        if faulty:
            _break(trainer, fault, step, folder)
            if fault == "noise" and step == AT:
                x = x * 1e4
        loss = trainer.step(x, x.roll(1, 1), hook)
    trainer.save(folder)
    weights = [_local(p.data).sum().item() for p in trainer.parameters()]
    Path(f"{folder}/end{number}").write_text(json.dumps({"loss": loss, "weights": weights}))
    dist.destroy_process_group()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def observe(name: str, fault: str) -> dict:
    """What became of both ranks."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        port = _free_port()
        work = [context.Process(target=rank, args=(n, port, name, fault, folder)) for n in range(2)]
        began = time.monotonic()
        for each in work:
            each.start()
        work[0].join(90)
        seconds = time.monotonic() - began
        hung = work[0].is_alive()
        for each in work:
            if each.is_alive() and (hung or fault == "stopped"):
                os.kill(each.pid, signal.SIGKILL)
            each.join()
        said = Path(f"{folder}/said0").read_text(errors="replace")
        ends = [json.loads(p.read_text()) for n in range(2) if (p := Path(f"{folder}/end{n}")).exists()]
        line = {"contender": name, "fault": fault, "seconds": round(seconds, 1)}
        if hung:
            return {**line, "outcome": "hangs"}
        if work[0].exitcode:
            error = next((t for t in reversed(said.splitlines()) if "rror" in t), said[-200:])
            return {**line, "outcome": "ends with an error", "named": "rank 1" in said, "error": error[:200]}
        finite = all(torch.isfinite(torch.tensor([e["loss"], *e["weights"]])).all() for e in ends)
        return {**line, "outcome": "goes on, status 0", "finite at the end": finite}


def main() -> None:
    """Run the command."""
    known = ["ddp", "fsdp2", *(["deepspeed"] if importlib.util.find_spec("deepspeed") else [])]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--contenders", nargs="+", choices=known, default=known)
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=FAULTS)
    flags = parser.parse_args()
    for name in flags.contenders:
        for fault in flags.faults:
            print(json.dumps(observe(name, fault)), flush=True)


if __name__ == "__main__":
    main()
