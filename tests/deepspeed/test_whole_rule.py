"""Optimizers whose update looks at whole tensors: parameters are put together wherever a part lies."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from megazero.deepspeed.optimizers.torch_rule import choose_rule
from megazero.deepspeed.optimizers.whole_rule import WholeRule
from megazero.errors import ConfigError
from megazero.mpu.context import ParallelContext
from tests.deepspeed.user_models import (
    Tied,
    assert_same,
    build,
    on_ranks,
    settings,
    start,
    train_engine,
    train_plain,
)


class Middle(torch.optim.Optimizer):
    """Moves each row by its mean, and keeps the means of all rows and how often it did so."""

    def __init__(self, params: Any, lr: float = 0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in (param for param in group["params"] if param.grad is not None):
                mean = param.grad.mean(-1, keepdim=True)
                state = self.state[param]
                state["count"] = state.get("count", 0) + 1
                state["mean"] = mean + 0.5 * state["mean"] if "mean" in state else mean
                param.sub_(group["lr"] / state["count"] * state["mean"])


class Shared(Middle):
    """Moves all parameters by one number of its group, which it keeps there."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["sum"] = group.get("sum", 0.0) + sum(float(p.grad.sum()) for p in group["params"])
            for param in group["params"]:
                param.sub_(group["lr"] * group["sum"])


class Growing(Middle):
    """Keeps more with every update."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            state = self.state[param]
            state[f"number {len(state)}"] = param.grad.mean(-1)


class Large(Middle):
    """Moves each element by itself, but for tensors of a hundred rows."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        if self.param_groups[0]["params"][0].shape[0] >= 100:
            super().step()


def check(make: Any, ranks: int, stage: int) -> None:
    """Some ranks train as torch does in one process."""

    def work(context: ParallelContext):
        model = build(Tied)
        trained = [param for param in model.parameters() if param.requires_grad]
        return train_engine(
            start(context, model, settings(stage), optimizer=make(trained)), context, range(3)
        )

    model = build(Tied)
    plain = make([param for param in model.parameters() if param.requires_grad])
    expected = train_plain(model, plain, ranks=ranks, accumulation=1, steps=3)
    assert_same(on_ranks(ranks, work)[-1], expected)


@pytest.mark.parametrize(("ranks", "stage"), [(2, 0), (3, 1), (3, 3)])
def test_layouts_train_as_torch_does(ranks: int, stage: int):
    check(partial(torch.optim.Adafactor, lr=1e-2, weight_decay=0.1), ranks, stage)
    check(partial(torch.optim.ASGD if stage == 0 else Middle, lr=1e-2), ranks, stage)


@pytest.mark.slow
@pytest.mark.parametrize("stage", range(4))
def test_adafactor_of_transformers_trains_as_by_itself(stage: int):
    Adafactor = pytest.importorskip("transformers.optimization").Adafactor
    check(Adafactor, 2, stage)  # it chooses its learning rate, and the group has None
    check(partial(Adafactor, lr=1e-2, relative_step=False, beta1=0.9, weight_decay=0.1), 2, stage)


def test_a_checkpoint_goes_on_at_another_stage_on_other_ranks(tmp_path):
    make = partial(torch.optim.Adafactor, lr=1e-2)

    def engine(context: ParallelContext, stage: int, seed: int) -> Any:
        return start(context, model := build(Tied, seed), settings(stage), optimizer=make(model.parameters()))

    def first(context: ParallelContext) -> None:
        trained = engine(context, 3, 0)
        train_engine(trained, context, range(2))
        trained.save_checkpoint(tmp_path)

    def second(context: ParallelContext) -> Any:
        trained = engine(context, 1, 7)
        trained.load_checkpoint(tmp_path)
        return train_engine(trained, context, range(2, 4)).weights

    def unbroken(context: ParallelContext) -> Any:
        trained = engine(context, 0, 0)
        train_engine(trained, context, range(2))
        return trained, context

    on_ranks(2, first)
    found = on_ranks(2, second)[0]
    expected = on_ranks(2, lambda context: train_engine(*unbroken(context), range(2, 4)).weights)[0]
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, msg=lambda m, n=name: f"{n}: {m}")


def test_what_cannot_run_on_whole_parameters_is_refused():
    params = [nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.ones(4))]
    for optimizer, why in (
        (Shared(params), "Shared gives other values for parameters together"),
        (Growing(params), "Growing keeps number 0 at first and number 0, number 1 later"),
        (torch.optim.LBFGS(params), "LBFGS fails there"),
    ):
        with pytest.raises(ConfigError, match=why):
            choose_rule(optimizer)


def test_a_class_that_treats_large_tensors_alone_as_wholes_is_noticed():
    small, large = (Large([nn.Parameter(torch.ones(rows, 4))]) for rows in (20, 200))
    kinds = [isinstance(choose_rule(found)(found.param_groups), WholeRule) for found in (small, large)]
    assert kinds == [False, True]
