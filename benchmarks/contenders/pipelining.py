"""PyTorch's own pipeline, `torch.distributed.pipelining`, over the plain GPT or over megazero's layers.

With megazero's layers, the stages compute the same as megazero's own, and only the executor differs. With
them, zero-bubble schedules use the weight gradients that the layers defer (`dw_builder`); with plain
layers, torch splits the backward graph by itself. What torch leaves to its user is in this file: gradient
sums in fp32, the sum of the tied gradients, clipping over the stages and AdamW.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from benchmarks.contenders import ActionTime, Shape
from benchmarks.contenders.chunks import Chunk, our_chunks, plain_chunks
from benchmarks.contenders.ours import join_context
from megazero.config.tree.parallel import ParallelConfig
from megazero.pipeline.schedules import build_schedule

# megazero's name of a schedule -> torch's class, and whether a rank has a list of stages
SCHEDULES = {
    "gpipe": (ScheduleGPipe, False),
    "1f1b": (Schedule1F1B, False),
    "interleaved": (ScheduleInterleaved1F1B, True),
    "zb-h1": (ScheduleInterleavedZeroBubble, True),
    "zb-v": (ScheduleZBVZeroBubble, True),
}
SPLIT = ("zb-h1", "zb-v")


class TimedStage(PipelineStage):
    """A stage that records how long its computations take, and reports when a backward is done.

    torch calls these methods after it has waited for what they need.
    """

    def __init__(self, chunk: Chunk, place: tuple[int, int], backward_done: Callable[[], None], split: bool):
        number, chunks = place
        tokens = torch.empty(chunk.shape.micro_batch, chunk.shape.sequence, dtype=torch.int64)
        super().__init__(
            chunk,
            number,
            chunks,
            torch.device("cpu"),
            input_args=(tokens if chunk.first else chunk.hidden().requires_grad_(),),
            output_args=(chunk.logits() if chunk.last else chunk.hidden().requires_grad_(),),
            dw_builder=chunk.defer() if split else None,
        )
        self.times: list[ActionTime] = []
        self.backward_done = backward_done

    def record(self, op: str, begin: float) -> None:
        seconds = time.perf_counter() - begin
        self.times.append(ActionTime(self.group_rank, op, self.stage_index, seconds))

    def add_loss(self, begin: float) -> None:
        """Count the loss as part of the last chunk's forward, with which it is computed."""
        last = self.times.pop()
        self.times.append(last._replace(seconds=last.seconds + time.perf_counter() - begin))

    def forward_one_chunk(self, *args, **kwargs):
        begin = time.perf_counter()
        output = super().forward_one_chunk(*args, **kwargs)
        self.record("F", begin)
        return output

    def backward_one_chunk(self, bwd_chunk_id, loss=None, full_backward=True, last_backward=False):
        begin = time.perf_counter()
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        self.backward_done()
        self.record("B" if full_backward else "I", begin)

    def backward_weight_one_chunk(self, bwd_chunk_id, last_backward=False):
        begin = time.perf_counter()
        super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        self.backward_done()
        self.record("W", begin)


class Update:
    """Gradient sums in fp32, clipping over all stages, and AdamW on fp32 weights.

    `ends` is the group of the first and last stage, whose copies of the vocabulary are tied; None if one rank
    has both.
    """

    def __init__(self, chunks: Iterable[Chunk], ends: dist.ProcessGroup | None):
        chunks = list(chunks)
        decays = {p: chunk.decays(p) for chunk in chunks for p in chunk.parameters()}
        self.main = {p: p if p.dtype == torch.float32 else nn.Parameter(p.detach().float()) for p in decays}
        words = [chunk.word for chunk in chunks if chunk.word is not None]
        self.tied = words[0] if words and ends is not None else None
        self.ends = ends
        has_first = any(chunk.first for chunk in chunks)
        self.counted = [p for p in self.main if has_first or p is not self.tied]
        groups = [
            {"params": [m for p, m in self.main.items() if decays[p] is decay], "weight_decay": 0.1 * decay}
            for decay in (True, False)
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-4, betas=(0.9, 0.95), fused=True)

    @torch.no_grad()
    def collect(self) -> None:
        """Add narrow gradients to the fp32 sums."""
        for parameter, main in self.main.items():
            if main is parameter or parameter.grad is None:
                continue
            if main.grad is None:
                main.grad = parameter.grad.float()
            else:
                main.grad += parameter.grad
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Sum the tied gradients, clip to a global norm of 1, update."""
        if self.tied is not None:
            dist.all_reduce(self.main[self.tied].grad, group=self.ends)
        norms = torch._foreach_norm([self.main[p].grad for p in self.counted])
        square = torch.stack(norms).square().sum()
        dist.all_reduce(square)
        factor = torch.clamp(1.0 / (square.sqrt() + 1e-6), max=1.0)
        torch._foreach_mul_([m.grad for m in self.main.values()], factor)
        self.optimizer.step()
        narrow = [(p, m) for p, m in self.main.items() if p is not m]
        if narrow:
            torch._foreach_copy_(*map(list, zip(*narrow, strict=True)))
        self.optimizer.zero_grad(set_to_none=True)


class Trainer:
    """The training step of a rank's chunks; returns the mean loss of all micro-batches on every rank."""

    def __init__(self, shape: Shape, chunks: dict[int, Chunk], kind: str, count: int):
        self.rank, size = dist.get_rank(), dist.get_world_size()
        apart = kind != "zb-v" and size > 1
        ends = dist.new_group([0, size - 1]) if apart else None
        self.update = Update(chunks.values(), ends if self.rank in (0, size - 1) else None)
        self.stages = [
            TimedStage(chunk, (number, count), self.update.collect, kind in SPLIT)
            for number, chunk in chunks.items()
        ]
        self.first, self.last = 0 in chunks, count - 1 in chunks
        self.microbatches = shape.accumulations
        make, several = SCHEDULES[kind]
        self.schedule = make(
            self.stages if several else self.stages[0],
            self.microbatches,
            loss_fn=self.loss,
            scale_grads=False,
        )
        batches = shape.batches(0)
        self.tokens, self.labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
        self.times: list[ActionTime] = []

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        begin = time.perf_counter()
        last = self.stages[-1]
        loss = last.submod.loss(logits, labels) / self.microbatches
        last.add_loss(begin)
        return loss

    def __call__(self) -> float:
        losses: list[Tensor] = []
        self.schedule.step(
            *((self.tokens,) if self.first else ()),
            target=self.labels if self.last else None,
            losses=losses,
            return_outputs=False,
        )
        begin = time.perf_counter()
        self.update.step()
        loss = torch.stack(losses).detach().sum() if losses else torch.zeros(())
        dist.all_reduce(loss)
        self.times.append(ActionTime(self.rank, "U", 0, time.perf_counter() - begin))
        return float(loss)

    def take_action_times(self) -> list[ActionTime]:
        """The times since they were last taken."""
        taken = [record for times in (self.times, *(s.times for s in self.stages)) for record in times]
        for times in (self.times, *(s.times for s in self.stages)):
            times.clear()
        return taken


def build(shape: Shape, rank: int, world_size: int, kind: str, per_stage: int, same_stages: bool):
    """`same_stages` uses megazero's layers instead of plain ones."""
    context = join_context(shape, rank, world_size, ParallelConfig(pipeline_model_parallel_size=world_size))
    stage_of = build_schedule(kind, world_size, shape.accumulations, per_stage).stage_of
    if same_stages:
        parallel = ParallelConfig(
            pipeline_model_parallel_size=world_size,
            pipeline_schedule=kind,
            num_virtual_stages_per_pipeline_rank=per_stage if kind == "interleaved" else None,
        )
        chunks = our_chunks(shape, context, parallel)
    else:
        chunks = plain_chunks(shape, context, stage_of)
    return Trainer(shape, chunks, kind, len(stage_of))
