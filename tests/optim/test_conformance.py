"""What every update rule must do, alone and under ZeRO: one sweep over a table of rules."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Literal

import pytest
import torch
from torch import Tensor, nn

from megazero.config.tree.optimizer import OptimizerConfig
from megazero.mpu.grid import ProcessGrid
from megazero.optim.build import build_update_rule
from megazero.optim.compressed.onebit_adam import OnebitAdam
from megazero.optim.compressed.zero_one_adam import ZeroOneAdam, ZeroOneSteps
from megazero.optim.elementwise import Adagrad, Adam, AdEMAMix, Lion, Sgd
from megazero.optim.grad_norm import local_square_sum
from megazero.optim.lamb import Lamb
from megazero.optim.rule import Pieces, UpdateRule
from megazero.optim.torch_rule import TorchRule
from tests.optim.rules import Lars, SelfSumming, SelfSummingLars
from tests.optim.sharded import LR, SPECS, sharded, values
from tests.tables import over_table

STEPS = 20


@dataclass(frozen=True)
class RuleRow:
    """A rule and its formula as the paper writes it.

    Attributes:
        formula: (rule, step, gradient, state by name) -> the step's direction; fp64, changes the state. None
            for a class of torch, which is its own formula.
        rate: (rule, step, norm of weights, norm of direction, exempt from decay) -> factor of the direction.
        decay: weight decay is a part of the gradient, a part of the direction, or apart from both.
        stages: under which it works.
    """

    rule: UpdateRule
    formula: Callable[[UpdateRule, int, Tensor, dict[str, Tensor]], Tensor] | None
    rate: Callable[[UpdateRule, int, float, float, bool], float] | None = None
    decay: Literal["gradient", "direction", "apart"] = "apart"
    stages: tuple[int, ...] = (0, 1, 2, 3)


def adam(rule: Adam, t: int, g: Tensor, state: dict[str, Tensor]) -> Tensor:
    state["exp_avg"] = rule.beta1 * state["exp_avg"] + (1 - rule.beta1) * g
    state["exp_avg_sq"] = rule.beta2 * state["exp_avg_sq"] + (1 - rule.beta2) * g * g
    unbiased = state["exp_avg"] / (1 - rule.beta1**t)
    return unbiased / ((state["exp_avg_sq"] / (1 - rule.beta2**t)).sqrt() + rule.eps)


def two_means(rule: AdEMAMix, t: int, g: Tensor, state: dict[str, Tensor]) -> Tensor:
    """Algorithm 1 of the paper, with its schedules of alpha and beta3."""
    alpha, beta3 = rule.alpha, rule.beta3
    if rule.alpha_warmup:
        alpha = min(t * alpha / rule.alpha_warmup, alpha)
    if rule.beta3_warmup:
        start, end, share = math.log(rule.beta1), math.log(beta3), t / rule.beta3_warmup
        beta3 = min(math.exp(start * end / ((1 - share) * end + share * start)), beta3)
    state["exp_avg_slow"] = beta3 * state["exp_avg_slow"] + (1 - beta3) * g
    fast = adam(rule, t, g, state)
    root = (state["exp_avg_sq"] / (1 - rule.beta2**t)).sqrt()
    return fast + alpha * state["exp_avg_slow"] / (root + rule.eps)


def heavy_ball(rule: Sgd | Lars, t: int, g: Tensor, state: dict[str, Tensor]) -> Tensor:
    if rule.momentum:
        state["momentum"] = rule.momentum * state["momentum"] + g
        return state["momentum"]
    return g


def lars(rule: Lars, t: int, weights: float, direction: float, exempt: bool) -> float:
    return weights / direction if weights and direction else 1.0


def sign(rule: Lion, t: int, g: Tensor, state: dict[str, Tensor]) -> Tensor:
    direction = torch.sign(rule.beta1 * state["exp_avg"] + (1 - rule.beta1) * g)
    state["exp_avg"] = rule.beta2 * state["exp_avg"] + (1 - rule.beta2) * g
    return direction


def shrinking(rule: Adagrad, t: int, g: Tensor, state: dict[str, Tensor]) -> Tensor:
    state["sum"] = state["sum"] + g * g
    return g / (state["sum"].sqrt() + rule.eps)


def quotient(rule: Lamb, t: int, g: Tensor, state: dict[str, Tensor]) -> Tensor:
    """Adam's direction, of corrected moments or of these themselves."""
    if rule.bias_correction == "moments":
        return adam(rule, t, g, state)
    state["exp_avg"] = rule.beta1 * state["exp_avg"] + (1 - rule.beta1) * g
    state["exp_avg_sq"] = rule.beta2 * state["exp_avg_sq"] + (1 - rule.beta2) * g * g
    return state["exp_avg"] / (state["exp_avg_sq"].sqrt() + rule.eps)


def lamb(rule: Lamb, t: int, weights: float, direction: float, exempt: bool) -> float:
    """The trust ratio; and DeepSpeed's correction of the rate."""
    ratio = 1.0
    if weights and direction and (rule.adapt_all or not exempt):
        ratio = min(max(weights / direction, rule.min_coeff), rule.max_coeff)
    if rule.bias_correction == "rate":
        ratio *= (1 - rule.beta2**t) ** 0.5 / (1 - rule.beta1**t)
    return ratio


def lamb_row(**options) -> RuleRow:
    return RuleRow(Lamb(**options), quotient, lamb, "direction")


def torch_row(name: str, **options) -> RuleRow:
    rule = build_update_rule(OptimizerConfig(lr=1.0, optimizer=name, **options))
    return RuleRow(rule, None, decay="gradient")


@cache
def rows() -> tuple[RuleRow, ...]:
    """Every rule. Those that are torch's take seconds to import."""
    return (
        RuleRow(Adam(), adam),
        RuleRow(Adam(0.8, 0.95, 1e-4), adam),
        RuleRow(AdEMAMix(), two_means),
        RuleRow(AdEMAMix(0.8, 0.95, 1e-4, 0.99, 8.0, 15, 9), two_means),
        RuleRow(Sgd(0.9), heavy_ball, decay="gradient"),
        RuleRow(Sgd(0.0), heavy_ball, decay="gradient"),
        RuleRow(Lars(0.9), heavy_ball, lars),
        lamb_row(),
        lamb_row(beta1=0.8, beta2=0.95, eps=1e-4, adapt_all=True),
        lamb_row(min_coeff=0.9, max_coeff=1.1, bias_correction="none", eps=1e-4),
        lamb_row(bias_correction="rate", adapt_all=True),
        RuleRow(OnebitAdam(freeze_step=100), adam, stages=(0,)),
        RuleRow(ZeroOneAdam(ZeroOneSteps(var_freeze_step=100, var_update_scaler=100)), adam, stages=(0,)),
        RuleRow(Lion(), sign),
        RuleRow(Adagrad(), shrinking, decay="gradient"),
        torch_row("adadelta", adadelta_eps=1e-3),
        torch_row("adamax", adam_beta2=0.95),
        torch_row("nadam", adam_beta1=0.5, adam_eps=1e-4),
        torch_row("radam", adam_beta2=0.9),
        torch_row("rmsprop", rmsprop_alpha=0.9, adam_eps=1e-4),
        RuleRow(SelfSumming(0.9), heavy_ball, decay="gradient", stages=(0,)),
        RuleRow(SelfSummingLars(0.8), heavy_ball, lars, stages=(0,)),
    )


def name(row: RuleRow) -> str:
    rule = row.rule
    return f"{rule.kind.__name__}({dict(rule.options)})" if isinstance(rule, TorchRule) else repr(rule)


EVERY_ROW = over_table("row", rows, ids=name)


def expected(row: RuleRow, param: Tensor, grads: list[Tensor], decay: float) -> Tensor:
    """Some updates of one whole parameter in fp64."""
    p = param.double()
    if row.formula is None:
        return by_torch(row.rule, p, grads, decay)
    state = {name: torch.zeros_like(p) for name in row.rule.state_names}
    for t, grad in enumerate(grads, start=1):
        gradient = grad.double() + (decay * p if row.decay == "gradient" else 0.0)
        direction = row.formula(row.rule, t, gradient, state)
        if row.decay == "direction":
            direction = direction + decay * p
        if row.rate is not None:
            norms = p.norm().item(), direction.norm().item()
            direction = direction * row.rate(row.rule, t, *norms, decay == 0.0)
        p = p - LR * direction - (LR * decay * p if row.decay == "apart" else 0.0)
    return p


def by_torch(rule: TorchRule, param: Tensor, grads: list[Tensor], decay: float) -> Tensor:
    """What the class itself makes of a whole parameter."""
    leaf = nn.Parameter(param.clone())
    optimizer = rule.make([leaf], LR, decay)
    for grad in grads:
        leaf.grad = grad.double()
        optimizer.step()
    return leaf.detach()


def update(rule, params, grads, states, *, step, decays, lr=LR, owners=None) -> None:
    """One update of pieces in one process; `owners` says which parameter each is a piece of."""
    owners = list(range(len(params))) if owners is None else owners
    pieces, asked = Pieces(params, grads, states, decays, step), {}
    if rule.needs.norms:
        squares = torch.zeros(len(params), len(rule.needs.norms), dtype=torch.float64)
        measured = rule.prepare(pieces)
        for owner, tensors in zip(owners, measured, strict=True):
            squares[owner] += torch.stack([local_square_sum([tensor]) for tensor in tensors])
        asked["norms"] = [squares[owner].sqrt() for owner in owners]
        asked["exempt"] = [decay == 0.0 for decay in decays]
    rule.step(pieces, lr, **asked)


def problem(shapes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    params = [torch.randn(shape, generator=generator) for shape in shapes]
    grads = [[torch.randn(shape, generator=generator) for shape in shapes] for _ in range(STEPS)]
    return params, grads


def train(rule, params, grads, decays, *, owners=None, states=None, first=1):
    params = [p.clone() for p in params]
    states = [rule.init_state(p) for p in params] if states is None else states
    for t, step_grads in enumerate(grads, start=first):
        update(rule, params, step_grads, states, step=t, decays=decays, owners=owners)
    return params, states


@pytest.mark.fast
@EVERY_ROW
def test_equals_its_formula(row):
    params, grads = problem([(33,), (4, 5), ()])
    decays = [0.1, 0.0, 0.1]
    trained, _ = train(row.rule, params, grads, decays)
    for i, (param, decay) in enumerate(zip(params, decays, strict=True)):
        want = expected(row, param, [g[i] for g in grads], decay)
        torch.testing.assert_close(trained[i].double(), want, rtol=2e-6, atol=2e-6)


@EVERY_ROW
def test_state_is_named_zeros(row):
    state = row.rule.init_state(torch.ones(5, 2).t())
    assert tuple(state) == row.rule.state_names
    for tensor in state.values():
        assert tensor.shape == (2, 5)
        assert tensor.dtype == torch.float32
        assert tensor.is_contiguous()
        assert not tensor.any()


@EVERY_ROW
def test_a_tensor_may_be_cut_anywhere(row):
    params, grads = problem([(1001,)])
    whole, whole_states = train(row.rule, params, grads, [0.1])
    cuts = [1, 0, 64, 333, 603]
    pieces, piece_states = train(
        row.rule,
        list(params[0].split(cuts)),
        [list(g[0].split(cuts)) for g in grads],
        [0.1] * len(cuts),
        owners=[0] * len(cuts),
    )
    # A kernel's vector body and its scalar tail may round the last bit differently.
    torch.testing.assert_close(torch.cat(pieces), whole[0], rtol=1e-5, atol=1e-6)
    for name in row.rule.state_names:
        joined = torch.cat([state[name] for state in piece_states])
        torch.testing.assert_close(joined, whole_states[0][name], rtol=1e-6, atol=1e-7)


@EVERY_ROW
def test_empty_tensors_are_welcome(row):
    params, grads = problem([(0,), (7,), (0, 3)])
    trained, _ = train(row.rule, params, grads, [0.1, 0.1, 0.0])
    alone, _ = train(row.rule, params[1:2], [g[1:2] for g in grads], [0.1])
    assert torch.equal(trained[1], alone[0])
    assert trained[0].shape == (0,)
    update(row.rule, [], [], [], step=1, decays=[])


@EVERY_ROW
def test_without_gradients_weights_decay_and_nothing_else_happens(row):
    """They shrink only where they are to: by (1 - lr wd) a step unless momentum carries the decay on.

    A trust ratio makes up for a small decay.
    """
    params, _ = problem([(9,), (5,)])
    trained, states = train(row.rule, params, [[torch.zeros(9), torch.zeros(5)]] * STEPS, decays=[0.5, 0.0])
    plain = row.decay == "apart" or row.rule == Sgd(0.0)
    wanted = (
        params[0] * (1 - LR * 0.5) ** STEPS
        if plain
        else expected(row, params[0], [torch.zeros(9)] * STEPS, 0.5).float()
    )
    torch.testing.assert_close(trained[0], wanted)
    assert torch.equal(trained[1], params[1])
    if row.formula is not None:  # torch's may start elsewhere, or keep an epsilon
        assert not any(tensor.any() for tensor in states[1].values())
        assert not plain or not any(tensor.any() for tensor in states[0].values())


@EVERY_ROW
def test_zero_learning_rate_moves_nothing(row):
    params, grads = problem([(9,)])
    before = params[0].clone()
    update(row.rule, params, grads[0], [row.rule.init_state(params[0])], step=1, lr=0.0, decays=[0.1])
    assert torch.equal(params[0], before)


@EVERY_ROW
def test_saved_and_restored_state_goes_on_bit_for_bit(row):
    params, grads = problem([(33,), (4, 5)])
    decays, half = [0.1, 0.0], STEPS // 2
    through, _ = train(row.rule, params, grads, decays)
    between, states = train(row.rule, params, grads[:half], decays)
    saved = [{name: state[name].numpy().copy() for name in row.rule.state_names} for state in states]
    restored = [{name: torch.from_numpy(array) for name, array in each.items()} for each in saved]
    resumed, _ = train(row.rule, between, grads[half:], decays, states=restored, first=half + 1)
    assert all(torch.equal(a, b) for a, b in zip(resumed, through, strict=True))


@EVERY_ROW
@over_table("bad", ["param", "grad", "dtype", "shape", "lengths", "step", "state"])
def test_unsuitable_arguments_are_refused_untouched(row, bad):
    rule = row.rule
    good, param = torch.ones(4, 6), torch.ones(4, 6)
    grad, state, step, decays = torch.ones(4, 6), rule.init_state(param), 1, [0.1, 0.1]
    if bad == "param":
        param, grad, state = param.t(), grad.t().contiguous(), rule.init_state(param.t())
    elif bad == "grad":
        grad = torch.ones(4, 12)[:, ::2]
    elif bad == "dtype":
        grad = grad.bfloat16()
    elif bad == "shape":
        grad = torch.ones(24)
    elif bad == "lengths":
        decays = [0.1]
    elif bad == "step":
        step = 0
    elif bad == "state":
        state = {"velocity": torch.zeros(4, 6)}
    states = [rule.init_state(good), state]
    with pytest.raises(ValueError, match=r"must be|must have"):
        update(rule, [good, param], [torch.ones(4, 6), grad], states, step=step, decays=decays)
    assert torch.equal(good, torch.ones(4, 6))
    assert not any(tensor.any() for tensor in states[0].values())


@cache
def whole(row: RuleRow) -> dict[str, Tensor]:
    return sharded(row.rule, ProcessGrid(), 0, SPECS)[0]


@EVERY_ROW
@pytest.mark.parametrize(
    "grid", [{"dp": 2}, {"dp": 3}, {"tp": 2}, {"dp": 2, "tp": 2}, {"dp": 4, "ep": 2}], ids=str
)
def test_shards_and_slices_move_like_whole_parameters(row, grid):
    for stage in row.stages:
        for found in sharded(row.rule, ProcessGrid(**grid), stage, SPECS):
            assert found.keys() == whole(row).keys()
            for name, want in whole(row).items():
                torch.testing.assert_close(found[name], want, rtol=1e-5, atol=1e-6, msg=f"{stage} {name}")


@EVERY_ROW
def test_the_optimizer_moves_parameters_by_the_formula(row):
    for spec in SPECS:
        grads = [values(spec, step) for step in range(1, 6)]
        want = expected(row, values(spec, 0), grads, 0.1 if spec.weight_decay else 0.0)
        found = whole(row)[f"{spec.name}/weight"]
        torch.testing.assert_close(found.double(), want, rtol=1e-5, atol=1e-5)
