"""A row of layers with tied ends, trained on stages that are threads, or by plain torch in one."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import megazero
from megazero.deepspeed.pipe.model import PipelineModule
from megazero.deepspeed.pipe.specs import LayerSpec, TiedLayerSpec
from megazero.mpu.context import ParallelContext, thread_context
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.thread_group import ThreadWorld

VOCABULARY, WIDTH, LENGTH, MICRO = 11, 8, 5, 2


class Block(nn.Module):
    """Hidden states and a mask go in and out, as in GPT-NeoX."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, given: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, mask = given
        return x + self.down(torch.tanh(self.up(self.norm(x)))) * mask.unsqueeze(-1), mask


class Embedding(nn.Embedding):
    """Looks up the tokens of a pair of tokens and mask."""

    def forward(self, given: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return super().forward(given[0]), given[1]


def head(module: nn.Embedding, given: tuple[Tensor, Tensor]) -> Tensor:
    """The embedding's weight as the head."""
    return F.linear(given[0], module.weight)


def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy."""
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def gpt(blocks: int = 4) -> list[Any]:
    """Embedding, blocks, and a head that is tied to the embedding."""
    tied = (Embedding, VOCABULARY, WIDTH)
    return [
        TiedLayerSpec("embed", *tied),
        *[LayerSpec(Block) for _ in range(blocks)],
        TiedLayerSpec("embed", *tied, forward_fn=head),
    ]


def fill(module: nn.Module) -> None:
    """Weights that depend on their names alone."""
    with torch.no_grad():
        for name, param in module.named_parameters():
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            param.copy_(torch.randn(param.shape, generator=generator) * 0.3)


def item(step: int, micro: int, replica: int, length: int = LENGTH) -> tuple[Any, Tensor]:
    """One micro-batch."""
    generator = torch.Generator().manual_seed(10_000 * step + 100 * micro + replica)
    tokens, labels = torch.randint(0, VOCABULARY, (2, MICRO, length), generator=generator)
    return (tokens, torch.rand(MICRO, length, generator=generator) > 0.2), labels


def items(replica: int, count: int, first: int = 0) -> Iterator[tuple[Any, Tensor]]:
    """The micro-batches of the steps from `first` on, of one of several pipelines."""
    return (item(step, micro, replica) for step in range(first, 1000) for micro in range(count))


def settings(stage: int = 0, accumulation: int = 3, **more: Any) -> dict[str, Any]:
    """A JSON that cuts whatever the stage allows, of every size."""
    return {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.5,
        "steps_per_print": 1000,
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 0,
            "stage3_max_live_parameters": 0,
        },
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        **more,
    }


def on_stages(stages: int, replicas: int, work: Callable[[ParallelContext], Any]) -> list[Any]:
    """`work` on each rank of so many pipelines, as threads."""
    grid, world = ProcessGrid(pp=stages, dp=replicas), ThreadWorld(stages * replicas, timeout=30.0)
    return world.run(lambda rank: work(thread_context(world, grid, rank)))


def engine_of(context: ParallelContext, config: dict[str, Any], layers: Any = None, **arguments: Any) -> Any:
    """The engine of the row of layers, or of others, with filled weights."""
    arguments = {"loss_fn": loss_fn, "partition_method": "uniform", **arguments}
    module = PipelineModule(layers or gpt(), topology=context, **arguments)
    fill(module)
    return megazero.initialize(model=module, config=config)[0]


def train(engine: Any, steps: int = 4, first: int = 0) -> tuple[list[float], list[float]]:
    """The losses and gradient norms of some steps."""
    losses, norms = [], []
    data = items(engine.grid.data_parallel_id, engine.micro_batches, first)
    for _ in range(steps):
        losses.append(float(engine.train_batch(data)))
        norms.append(float(engine.get_global_grad_norm()))
    return losses, norms
