"""Muon under `megazero.initialize`: torch's class, and matrices beside AdamW, at any stage."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megazero.deepspeed.optimizers.muon import MuonWithAuxAdam
from megazero.deepspeed.optimizers.torch_rule import choose_rule
from megazero.errors import ConfigError
from megazero.mpu.context import ParallelContext, solo_context
from megazero.optim.elementwise import Adam
from megazero.optim.muon import Muon, NewtonSchulz
from megazero.optim.rule import Pieces
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


def mark(model: nn.Module) -> nn.Module:
    """Matrices between hidden vectors, as a user of DeepSpeed marks them."""
    for name, param in model.named_parameters():
        param.use_muon = param.ndim == 2 and "embed" not in name
    return model


def both(model: nn.Module) -> MuonWithAuxAdam:
    params = [p for p in mark(model).parameters() if p.requires_grad]
    return MuonWithAuxAdam(
        [
            {"params": [p for p in params if p.use_muon], "use_muon": True, "lr": 0.01, "weight_decay": 0.1},
            {"params": [p for p in params if not p.use_muon], "use_muon": False, "lr": 1e-3, "eps": 1e-4},
        ]
    )


def record(ranks: int, stage: int, **arguments):
    optimizer = arguments.pop("make", None)

    def work(context: ParallelContext):
        model = mark(build(Tied))
        own = {"optimizer": optimizer(model)} if optimizer else {}
        return train_engine(start(context, model, settings(stage, **arguments), **own), context, range(4))

    return on_ranks(ranks, work)


class Plain(torch.optim.Optimizer):
    """Muon's groups by the rule and others by torch's AdamW, in one process on whole matrices."""

    def __init__(self, groups):
        super().__init__([dict(group) for group in groups], {})
        rest = [group for group in groups if not group.get("use_muon", True)]
        self.rest = torch.optim.AdamW(rest) if rest else None

    def step(self, closure=None):
        for group in self.param_groups if self.rest is None else self.param_groups[:1]:
            for param in (each for each in group["params"] if each.grad is not None):
                state = self.state[param] or Muon().init_state(param)
                self.state[param] = state
                pieces = Pieces([param.data], [param.grad], [state], [group["weight_decay"]], 1)
                (prepared,) = Muon().prepare(pieces)
                Muon().step(pieces, group["lr"], [Muon().change(prepared.clone()[None])[0]])
        if self.rest is not None:
            self.rest.step()


def plain(make, ranks: int):
    model = mark(build(Tied))
    return train_plain(model, Plain(make(model).param_groups), ranks=ranks, accumulation=1, steps=4)


@pytest.mark.parametrize(("ranks", "stage"), [(1, 0), (2, 0), (2, 1), (2, 2), (3, 3)])
def test_any_stage_trains_as_whole_matrices_would(ranks, stage):
    expected = plain(both, ranks)
    for found in record(ranks, stage, make=both):
        assert_same(found, expected)


def test_the_json_is_muon_for_marked_parameters():
    told = {"muon_lr": 0.01, "adam_lr": 1e-3, "weight_decay": 0.1, "eps": 1e-4}

    def direct(model):
        optimizer = both(model)
        optimizer.param_groups[1] |= {"weight_decay": 0.1, "betas": (0.9, 0.999)}
        return optimizer

    json = record(2, 1, optimizer={"type": "Muon", "params": told})
    assert_same(json[0], record(2, 1, make=direct)[0])


def test_without_marks_matrices_are_told_by_their_names():
    model = build(Tied)
    optimizer = {"type": "muon", "params": {"lr": 0.01, "ns_method": "gram"}}
    engine = start(solo_context(), model, settings(0, optimizer=optimizer))
    marked = {name for name, param in model.named_parameters() if param.use_muon}
    assert marked == {
        n for n, p in mark(build(Tied)).named_parameters() if p.use_muon and p.requires_grad
    } | {n for n, p in build(Tied).named_parameters() if p.ndim == 2 and not p.requires_grad}
    assert [group["use_muon"] for group in engine.optimizer.param_groups] == [True, False]


def test_by_itself_it_updates_matrices_and_the_rest():
    model = mark(build(Tied))
    (group, rest) = both(model).param_groups
    twin = mark(build(Tied))
    expected = Plain(both(twin).param_groups)
    optimizer = MuonWithAuxAdam([group, rest])
    for _ in range(3):
        for param, other in zip(model.parameters(), twin.parameters(), strict=True):
            if param.requires_grad:
                param.grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(param.numel()))
                other.grad = param.grad.clone()
        optimizer.step()
        expected.step()
    for param, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(param, other)


def test_groups_say_which_they_are():
    weight, bias = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))
    with pytest.raises(ConfigError, match="`use_muon` of parameter group 0 must be true or false"):
        MuonWithAuxAdam([{"params": [weight]}])
    with pytest.raises(ConfigError, match="`use_muon` must be false for parameters that are not matrices"):
        MuonWithAuxAdam([{"params": [bias], "use_muon": True}])


def test_torchs_muon_is_the_rule_with_its_options():
    weight = nn.Parameter(torch.ones(2, 3))
    plain = torch.optim.Muon([weight], lr=0.01)
    assert choose_rule(plain)(plain.param_groups) == Muon(rest=Adam(0.9, 0.95, 1e-10))
    told = {"momentum": 0.9, "nesterov": False, "ns_steps": 3, "ns_coefficients": (2.0, -1.5, 0.5)}
    other = torch.optim.Muon([weight], lr=0.01, adjust_lr_fn="match_rms_adamw", **told)
    found = choose_rule(other)(other.param_groups)
    assert found == Muon(
        0.9, False, NewtonSchulz(((2.0, -1.5, 0.5),), 3), "spectral", 0.2, rest=Adam(0.9, 0.95, 1e-10)
    )
    strange = torch.optim.Muon([weight], lr=0.01, eps=1e-3)
    with pytest.raises(ConfigError, match="`eps` of Muon must be 1e-07, but is 0.001"):
        choose_rule(strange)(strange.param_groups)


@pytest.mark.parametrize("stage", [1, 3])
def test_torchs_muon_trains_matrices_and_freezes_the_rest(stage):
    def make(model: nn.Module) -> torch.optim.Optimizer:
        for param in model.parameters():
            param.requires_grad_(param.use_muon and param.requires_grad)
        return torch.optim.Muon([param for param in model.parameters() if param.requires_grad], lr=0.01)

    others, expected = record(2, stage, make=make), plain(make, 2)
    for found in others:
        assert_same(found, expected)
