"""Trainings with a gradient of its own for each replica, for rules that sum over the replicas themselves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from megazero.mpu.context import ParallelContext, thread_context
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.param_spec import Cut, InitialValues, ParamSpec
from megazero.mpu.thread_group import ThreadWorld
from megazero.optim.rule import UpdateRule
from megazero.zero.build import build_store
from megazero.zero.optimizer import Optimizer
from megazero.zero.parallel import DataParallel
from megazero.zero.unit import Unit
from tests.zero.policies import make_policy

LR, DECAY = 0.02, 0.1
ANY = InitialValues("zeros")
SPECS = (
    ParamSpec("columns", (4, 6), ANY, (Cut(0, "tp"),)),
    ParamSpec("words", (5, 3), ANY, (Cut(0, "tp", padded_size=8),)),
    ParamSpec("rows", (5, 4), ANY, (Cut(1, "tp"),)),
    ParamSpec("norm", (7,), ANY, weight_decay=False),
    ParamSpec("empty", (0, 3), ANY),
    ParamSpec("scalar", (), ANY),
)
UNUSED = 3
"""A row of "words" that never has a gradient."""


def values(spec: ParamSpec, step: int, replica: int = 0) -> Tensor:
    """Weights (step 0), or a replica's part of the gradient of a step, whole."""
    seed = 1000 * step + 100 * replica + sum(map(ord, spec.name))
    drawn = torch.randn(spec.shape, generator=torch.Generator().manual_seed(seed))
    if spec.name == "words" and step:
        drawn[UNUSED] = 0.0
    return drawn


class Run:
    """Some parameters and their optimizer on one rank."""

    def __init__(self, rule: UpdateRule, context: ParallelContext, bucket_size: int = 25, clip: float = 0.0):
        self.context = context
        self.params = [nn.Parameter(spec.shard(values(spec, 0), context.place).clone()) for spec in SPECS]
        for param, spec in zip(self.params, SPECS, strict=True):
            param.spec = spec
        units = [Unit(0, nn.Module(), (param,)) for param in self.params]
        policy = make_policy(0, bucket_size=bucket_size, needs=rule.needs)
        store = build_store(units, policy, context)
        self.parallel = DataParallel(units, store, policy, context)
        self.optimizer = Optimizer(store, rule, context, clip)

    def gather(self, step: int, poisoned: int | None = None) -> None:
        """The gradients of a step; those of the replica `poisoned` have a NaN."""
        self.parallel.start()
        self.parallel.begin_backward(0, reduce=True)
        replica = self.context.replica.rank
        for param, spec in zip(self.params, SPECS, strict=True):
            param.grad = spec.shard(values(spec, step, replica), self.context.place).clone()
            if replica == poisoned and spec.name == "rows":
                param.grad[0, 0] = torch.nan
            self.parallel.collect(param)
        self.parallel.end_backward()
        self.parallel.finish()

    def train(self, steps: Iterable[int], lr: float = LR) -> Run:
        """Make these steps."""
        for step in steps:
            self.gather(step)
            assert self.optimizer.step(lr, DECAY).applied
        return self

    def state(self, kinds: Sequence[str] | None = None) -> dict[str, Tensor]:
        """Weights and moments, whole."""
        return {
            f"{spec.name}/{kind}": spec.unshard(tensor, self.context.groups).clone()
            for spec, state in self.optimizer.full_state(kinds)
            for kind, tensor in state.items()
        }

    def flats(self) -> list[Tensor]:
        """All state of this rank, as it is."""
        store = self.optimizer.store
        return [flat.clone() for bucket in store.buckets for flat in store.at_rest(bucket).values()]


def on_ranks(grid: ProcessGrid, work) -> list:
    """`work` of each rank's context, ranks as threads."""
    world = ThreadWorld(grid.world_size, 20.0)
    return world.run(lambda rank: work(thread_context(world, grid, rank)))
