"""What the optimizer over shards owes to every rule that `--optimizer` names: groups, clipping, resuming."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from torch import Tensor, nn

from megazero.config.tree.optimizer import OptimizerConfig
from megazero.mpu.context import ParallelContext, thread_context
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.matrices import Matrices
from megazero.mpu.param_spec import Cut, InitialValues, ParamSpec
from megazero.mpu.thread_group import ThreadWorld
from megazero.optim.build import build_update_rule
from megazero.optim.rule import UpdateRule
from megazero.zero.build import build_store
from megazero.zero.optimizer import Optimizer
from megazero.zero.parallel import DataParallel
from megazero.zero.unit import Unit
from tests.optim.sharded import values
from tests.tables import over_table
from tests.zero.policies import make_policy

STATE = {
    "adam": ("exp_avg", "exp_avg_sq"),
    "ademamix": ("exp_avg", "exp_avg_slow", "exp_avg_sq"),
    "sgd": ("momentum",),
    "lamb": ("exp_avg", "exp_avg_sq"),
    "lion": ("exp_avg",),
    "adagrad": ("sum",),
    "adadelta": ("square_avg", "acc_delta"),
    "adamax": ("exp_avg", "exp_inf"),
    "nadam": ("exp_avg", "exp_avg_sq"),
    "radam": ("exp_avg", "exp_avg_sq"),
    "rmsprop": ("square_avg",),
    "muon": ("momentum", "exp_avg", "exp_avg_sq"),
}
EVERY = over_table("name", STATE)
SPECS = (
    ParamSpec("columns", (4, 6), InitialValues("zeros"), (Cut(0, "tp"),), matrices=Matrices()),
    ParamSpec("words", (5, 3), InitialValues("zeros"), (Cut(0, "tp", padded_size=8),)),
    ParamSpec("rows", (5, 4), InitialValues("zeros"), (Cut(1, "tp"),), matrices=Matrices()),
    ParamSpec("bias", (11,), InitialValues("zeros"), weight_decay=False),
)
GROUPS = {"columns": 0, "words": 1, "rows": 1, "bias": 0}
LRS, DECAYS = [0.02, 0.005], [0.1, 0.3]
State = dict[str, Tensor]


def rule_of(name: str) -> UpdateRule:
    return build_update_rule(OptimizerConfig(lr=1.0, optimizer=name))


class Run:
    """Parameters of `SPECS` on one rank, in two groups, and their optimizer, which clips."""

    def __init__(self, name: str, context: ParallelContext, stage: int, specs=SPECS, clip: float = 0.5):
        rule, self.context = rule_of(name), context
        self.specs = specs
        self.params = [nn.Parameter(spec.shard(values(spec, 0), context.place).clone()) for spec in specs]
        for param, spec in zip(self.params, specs, strict=True):
            param.spec = spec
        units = [Unit(0, nn.Module(), (param,)) for param in self.params]
        policy = make_policy(stage, bucket_size=25, needs=rule.needs)
        groups = {id(p): GROUPS[spec.name] for p, spec in zip(self.params, specs, strict=True)}
        store = build_store(units, policy, context, groups=groups)
        self.parallel = DataParallel(units, store, policy, context)
        self.optimizer = Optimizer(store, rule, context, clip)

    def step(self, *numbers: int) -> Run:
        for number in numbers:
            self.parallel.start()
            self.parallel.begin_backward(0, reduce=True)
            for param, spec in zip(self.params, self.specs, strict=True):
                whole = spec.shard(values(spec, number), self.context.place)
                param.grad = whole / self.context.replica.size
                self.parallel.collect(param)
            self.parallel.end_backward()
            self.parallel.finish()
            assert self.optimizer.step(LRS, DECAYS).applied
        return self

    def state(self) -> State:
        return {
            f"{spec.name}/{kind}": spec.unshard(tensor, self.context.groups).clone()
            for spec, kinds in self.optimizer.full_state()
            for kind, tensor in kinds.items()
        }

    def load(self, state: State, updates: int) -> Run:
        """As a checkpoint is loaded."""

        def tensor_of(spec: ParamSpec, kind: str) -> Tensor:
            return spec.shard(state[f"{spec.name}/{kind}"], self.context.place)

        self.optimizer.load(tensor_of, ("weight", *self.optimizer.state_names))
        self.optimizer.publish()
        self.optimizer.updates = updates
        return self


def on(grid: ProcessGrid, work) -> list[State]:
    world = ThreadWorld(grid.world_size, 20.0)
    return world.run(lambda rank: work(thread_context(world, grid, rank)))


def test_these_are_all_optimizers():
    """But for those that sum over the replicas themselves: tests/optim/compressed/."""
    everything = set(get_args(OptimizerConfig.model_fields["optimizer"].annotation))
    assert everything - set(STATE) == {"onebit-adam", "zero-one-adam", "onebit-lamb"}


@EVERY
def test_state_has_these_names(name):
    (state,) = on(ProcessGrid(), lambda context: Run(name, context, 0).state())
    kinds = tuple(dict.fromkeys(key.split("/")[1] for key in state))
    assert sorted(kinds) == sorted(("weight", *STATE[name]))


@EVERY
def test_groups_have_their_own_rate_and_decay(name):
    """Together, they move as each parameter does alone with its group's; the last is exempt from decay."""
    (together,) = on(ProcessGrid(), lambda context: Run(name, context, 0, clip=0.0).step(1, 2, 3).state())
    for spec in SPECS:
        (alone,) = on(
            ProcessGrid(), lambda context, s=spec: Run(name, context, 0, (s,), 0.0).step(1, 2, 3).state()
        )
        for key, tensor in alone.items():
            torch.testing.assert_close(together[key], tensor, rtol=1e-6, atol=1e-7)


@EVERY
def test_clipped_gradients_are_shorter_by_the_norm_of_all(name):
    """Four updates of any layout, with a norm far above the bound."""
    (alone,) = on(ProcessGrid(), lambda context: Run(name, context, 0).step(1, 2, 3, 4).state())
    for found in on(ProcessGrid(dp=2, tp=2), lambda context: Run(name, context, 1).step(1, 2, 3, 4).state()):
        for key, tensor in alone.items():
            torch.testing.assert_close(found[key], tensor, rtol=1e-4, atol=1e-5)


@EVERY
@pytest.mark.parametrize("done", [0, 3])
def test_state_moves_between_layouts_bit_for_bit_and_goes_on(name, done):
    """Also before the first update, when some classes of torch have no state of their own yet."""
    before, after = range(1, done + 1), range(done + 1, 6)
    through = on(ProcessGrid(dp=2), lambda context: Run(name, context, 1).step(*before, *after).state())[0]
    saved = on(ProcessGrid(dp=2), lambda context: Run(name, context, 1).step(*before).state())[0]
    again = on(
        ProcessGrid(dp=2), lambda context: Run(name, context, 1).load(saved, done).step(*after).state()
    )
    assert all(torch.equal(again[0][key], tensor) for key, tensor in through.items())
    for grid, stage in ((ProcessGrid(dp=3), 3), (ProcessGrid(tp=2, dp=2), 2), (ProcessGrid(), 0)):
        moved = on(grid, lambda context, s=stage: Run(name, context, s).load(saved, done).state())
        for each in moved:
            assert all(torch.equal(each[key], tensor) for key, tensor in saved.items())
        gone_on = on(
            grid, lambda context, s=stage: Run(name, context, s).load(saved, done).step(*after).state()
        )
        for key, tensor in through.items():
            torch.testing.assert_close(gone_on[0][key], tensor, rtol=1e-4, atol=1e-5)
