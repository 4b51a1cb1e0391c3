"""Parameters by themselves, cut and sharded over threads, whose gradients the replicas add up."""

from __future__ import annotations

from collections.abc import Sequence

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

LR = 0.02

SPECS = (
    ParamSpec("columns", (4, 6), InitialValues("zeros"), (Cut(0, "tp"),)),
    ParamSpec("words", (5, 3), InitialValues("zeros"), (Cut(0, "tp", padded_size=8),)),
    ParamSpec("rows", (5, 4), InitialValues("zeros"), (Cut(1, "tp"),)),
    ParamSpec("experts", (2, 4, 3), InitialValues("zeros"), (Cut(0, "ep"), Cut(1, "etp"))),
    ParamSpec("experts' bias", (2, 3), InitialValues("zeros"), (Cut(0, "ep"),)),
    ParamSpec("norm", (7,), InitialValues("zeros"), weight_decay=False),
    ParamSpec("bias", (11,), InitialValues("zeros")),
    ParamSpec("empty", (0, 3), InitialValues("zeros")),
    ParamSpec("scalar", (), InitialValues("zeros")),
    ParamSpec("zero", (3,), InitialValues("zeros")),
)


def values(spec: ParamSpec, number: int) -> Tensor:
    """Weights (0) or the gradient of a step, whole; those of `zero` are 0 at first."""
    seed = 1000 * number + sum(map(ord, spec.name))
    drawn = torch.randn(spec.shape, generator=torch.Generator().manual_seed(seed))
    return drawn * 0.0 if spec.name == "zero" and number < 2 else drawn


def sharded(
    rule: UpdateRule, grid: ProcessGrid, stage: int, specs: Sequence[ParamSpec], bucket_size: int = 25
) -> list[dict[str, Tensor]]:
    """Each rank's weights and moments, whole, after some steps; replicas add parts of each gradient."""
    world = ThreadWorld(grid.world_size, 20.0)

    def work(rank: int) -> dict[str, Tensor]:
        context = thread_context(world, grid, rank)
        optimizer = trained(rule, stage, context, specs, bucket_size)
        return {
            f"{spec.name}/{kind}": spec.unshard(tensor, context.groups).clone()
            for spec, state in optimizer.full_state()
            for kind, tensor in state.items()
        }

    return world.run(work)


def trained(
    rule: UpdateRule, stage: int, context: ParallelContext, specs: Sequence[ParamSpec], bucket_size: int = 25
) -> Optimizer:
    """An optimizer after five steps on one rank."""
    place = context.place
    params = [nn.Parameter(spec.shard(values(spec, 0), place).clone()) for spec in specs]
    for param, spec in zip(params, specs, strict=True):
        param.spec = spec
    units = [Unit(0, nn.Module(), (param,)) for param in params]
    policy = make_policy(
        stage,
        bucket_size=bucket_size,
        persistence_threshold=5,
        needs=rule.needs,
    )
    store = build_store(units, policy, context)
    parallel, optimizer = DataParallel(units, store, policy, context), Optimizer(store, rule, context, 0.0)
    for step in range(1, 6):
        parallel.start()
        parallel.begin_backward(0, reduce=True)
        for param, spec in zip(params, specs, strict=True):
            group = context.groups[spec.replicas]
            share = 0.25 if group.rank else 1.0 - 0.25 * (group.size - 1)
            param.grad = share * spec.shard(values(spec, step), place)
            parallel.collect(param)
        parallel.end_backward()
        parallel.finish()
        assert optimizer.step(LR, 0.1).applied
    return optimizer
