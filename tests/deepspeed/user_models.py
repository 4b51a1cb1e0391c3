"""Models and trainings in plain torch, against which `megazero.initialize` is held."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import megazero
from megazero.mpu.context import ParallelContext, thread_context
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.thread_group import ThreadWorld

VOCABULARY, WIDTH, LENGTH, MICRO = 11, 8, 5, 2

# Ranks are threads here, and torch's random generator is the process's.
BUILDING = threading.Lock()


class Tied(nn.Module):
    """A reused layer, an unused and a frozen parameter, one of its own, and a head that reads the embedding's
    weight out of turn."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.reused = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = x + self.down(torch.tanh(self.up(x)))
        x = self.frozen(self.reused(torch.tanh(self.reused(x))))
        logits = F.linear(self.norm(x) * self.scale, self.embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Encoder(nn.Module):
    """torch's own transformer, whose attention uses a layer's weights without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        self.seen += 1
        logits = self.head(self.layers(self.embedding(tokens)))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def build(kind: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """The same model on every rank."""
    with BUILDING:
        torch.manual_seed(seed)
        return kind()


def batch(step: int, micro: int, rank: int) -> tuple[Tensor, Tensor]:
    """Tokens and labels of one micro-batch."""
    generator = torch.Generator().manual_seed(10_000 * step + 100 * micro + rank)
    return tuple(torch.randint(0, VOCABULARY, (2, MICRO, LENGTH), generator=generator))


@dataclass
class Record:
    """What a training did: mean loss and gradient norm of each step, and the weights after all."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]


def train_plain(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    ranks: int,
    accumulation: int,
    steps: int = 5,
    clip: float = 0.5,
    scheduler: Any = None,
) -> Record:
    """The samples of all ranks in one process, without megazero."""
    record = Record([], [], {})
    for step in range(steps):
        optimizer.zero_grad()
        total = 0.0
        for micro in range(accumulation):
            for rank in range(ranks):
                loss = model(*batch(step, micro, rank)) / (ranks * accumulation)
                loss.backward()
                total += loss.item()
        record.losses.append(total)
        for param in model.parameters():  # as in ZeRO, no gradient is a gradient of zeros
            if param.requires_grad and param.grad is None:
                param.grad = torch.zeros_like(param)
        record.norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip)))
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    record.weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return record


def train_engine(engine: Any, context: ParallelContext, steps: range) -> Record:
    """The same on one rank of several, through an engine."""
    record = Record([], [], {})
    for step in steps:
        total = torch.zeros(())
        for micro in range(engine.gradient_accumulation_steps()):
            loss = engine(*batch(step, micro, context.data.rank))
            engine.backward(loss)
            engine.step()
            total += loss.detach().float() / engine.gradient_accumulation_steps()
        context.data.all_reduce(total).wait()
        record.losses.append(float(total) / context.data.size)
        record.norms.append(engine.get_global_grad_norm())
    record.weights = engine.module_state_dict()
    return record


def settings(stage: int = 0, accumulation: int = 1, **more: Any) -> dict[str, Any]:
    """A JSON that cuts whatever the stage allows, of every size."""
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 0}
    return {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.5,
        "steps_per_print": 1000,
        "zero_optimization": zero,
        **more,
    }


ADAMW = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}


def on_ranks(count: int, work: Callable[[ParallelContext], Any]) -> list:
    """`work` on each of `count` data-parallel ranks, as threads."""
    grid, world = ProcessGrid(dp=count), ThreadWorld(count, timeout=30.0)
    return world.run(lambda rank: work(thread_context(world, grid, rank)))


def start(context: ParallelContext, model: nn.Module, config: dict[str, Any], **arguments: Any) -> Any:
    """The engine of `megazero.initialize`."""
    return megazero.initialize(model=model, config=config, mpu=context, **arguments)[0]


def assert_same(record: Record, expected: Record, rtol: float = 1e-4, atol: float = 1e-5) -> None:
    """Two trainings are one, to rounding."""
    torch.testing.assert_close(record.losses, expected.losses, rtol=rtol, atol=atol)
    torch.testing.assert_close(record.norms, expected.norms, rtol=rtol, atol=atol)
    assert record.weights.keys() == expected.weights.keys()
    for name, value in expected.weights.items():
        found = record.weights[name]
        torch.testing.assert_close(found, value, rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}")
