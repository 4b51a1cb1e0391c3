"""Trainings by hand for the tests of ZeRO: a model, a policy, some steps, and what they did."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from megazero.mpu.context import ParallelContext, solo_context, thread_context
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.thread_group import ThreadWorld
from megazero.optim.elementwise import Adam
from megazero.optim.rule import UpdateRule
from megazero.zero.build import build_store
from megazero.zero.optimizer import Optimizer
from megazero.zero.parallel import DataParallel
from megazero.zero.policy import ZeroPolicy
from megazero.zero.store.device import DeviceStore
from megazero.zero.store.store import Store
from megazero.zero.unit import Unit, module_units
from tests.zero.policies import make_policy

Loss = Callable[[nn.Module, int, int], Tensor]  # (model, step, sample) -> that sample's loss
SAMPLES = 12  # of one step: over 2, 3 or 4 ranks, at once or in up to 3 micro-batches


@dataclass
class Record:
    """What a training did: per step the norm, then gradients and weights by name."""

    norms: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    weights: list[dict[str, Tensor]] = field(default_factory=list)


class Trainer:
    """A model under ZeRO on one rank.

    Args:
        model: its parameters are spread as `policy` says.
        loss: of one sample.
        policy: see `ZeroPolicy`.
        context: this rank.
        units: default: one per module that owns parameters.
        fill: initial values of meta parameters.
        kind: of store.
        rule: updates the weights.
        overlap: reduce while backward runs.
        late: see `DataParallel`.
        multiple: see `build_store`.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        policy: ZeroPolicy,
        context: ParallelContext,
        units: Sequence[Unit] | None = None,
        fill: Callable | None = None,
        kind: Callable[[ZeroPolicy], Store] = DeviceStore,
        rule: UpdateRule | None = None,
        *,
        overlap: bool = True,
        late: bool = False,
        multiple: int = 1,
    ):
        self.model, self.loss, self.context = model, loss, context
        units = module_units(model) if units is None else units
        self.store = build_store(units, policy, context, fill, kind=kind, multiple=multiple)
        self.parallel = DataParallel(units, self.store, policy, context, late=late)
        self.optimizer = Optimizer(self.store, rule or Adam(eps=1e-3), context, 0.5)
        self.every = policy.stage >= 2
        self.overlap = overlap

    def accumulate(self, step: int, micro_batches: int) -> None:
        """Forward and backward of this rank's samples."""
        mine = range(self.context.replica.rank, SAMPLES, self.context.replica.size)
        self.parallel.start(step)
        for i in range(micro_batches):
            self.parallel.gather(0)
            loss = sum(self.loss(self.model, step, sample) for sample in mine[i::micro_batches])
            self.parallel.gather(0, backward=True)
            reduce = self.every or i == micro_batches - 1
            self.parallel.begin_backward(0, reduce=reduce and self.overlap)
            loss.backward()
            self.parallel.end_backward()
            if reduce and not self.overlap:
                self.parallel.reduce(0)
            self.parallel.release(0)
        self.parallel.finish()

    def train(self, steps: int = 3, micro_batches: int = 1) -> Record:
        """The record of some steps, the same on every rank."""
        record = Record()
        for step in range(steps):
            self.accumulate(step, micro_batches)
            record.gradients.append({s.name: g.clone() for s, g in self.optimizer.full_gradients()})
            record.norms.append(self.optimizer.step(1e-2, 0.1, 1 / SAMPLES).grad_norm)
            record.weights.append({s.name: v["weight"].clone() for s, v in self.optimizer.full_state()})
        return record


def in_threads(size: int, work: Callable[[ParallelContext], object], node_size: int = 1) -> list:
    """`work` of each data-parallel rank, ranks as threads."""
    grid, world = ProcessGrid(dp=size), ThreadWorld(size, timeout=20.0)
    return world.run(lambda rank: work(thread_context(world, grid, rank, node_size=node_size)))


def serial(make: Callable[[], nn.Module], loss: Loss, steps: int = 3) -> Record:
    """The record of one process without ZeRO."""
    return Trainer(make(), loss, make_policy(), solo_context()).train(steps)


def assert_same(record: Record, expected: Record, rtol: float = 1e-4, atol: float = 1e-6) -> None:
    """Two trainings are one, to rounding."""
    torch.testing.assert_close(record.norms, expected.norms, rtol=1e-5, atol=0.0)
    for kind in ("gradients", "weights"):
        for step, (got, want) in enumerate(zip(getattr(record, kind), getattr(expected, kind), strict=True)):
            assert got.keys() == want.keys()
            for name in want:
                torch.testing.assert_close(
                    got[name],
                    want[name],
                    rtol=rtol,
                    atol=atol,
                    msg=lambda m, name=name, step=step, kind=kind: f"{kind} of {name}, step {step}: {m}",
                )
