"""A step of the elementwise optimizers: the formula of every implementation, and what compiled ones keep."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from megazero.ops.dispatch import Implementation
from megazero.ops.native import NATIVE as KERNELS
from megazero.ops.native import address, available, update_pass
from megazero.ops.update import UPDATE, StepFacts, UpdateCall, UpdateFacts, update_step
from megazero.optim.elementwise import Adagrad, Adam, Elementwise, Lion, Sgd
from tests.tables import over_table

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
SIZES = (*range(1, 71), 127, 128, 129, 1023, 4097)
NATIVE = pytest.mark.skipif(not available(), reason="the compiled kernels are not built")


RULES = (Adam(0.9, 0.99), Lion(0.9, 0.99), Adagrad(), Sgd(0.0), Sgd(0.9))
EVERY_RULE = over_table("rule", RULES, ids=repr)


def run(
    each: Implementation,
    rule: Elementwise,
    param: Tensor,
    grad: Tensor,
    states: list[Tensor],
    weights: Tensor | None = None,
    scale: float = 1.0,
) -> None:
    """One step of single tensors by one implementation."""
    each.fn(UpdateCall(rule, StepFacts(3, 0.01, 0.1), [param], [grad], [states], [weights], scale))


def step(rule: Elementwise, at: StepFacts, param: Tensor, grad: Tensor, *states: Tensor, out=None) -> None:
    """One step of single tensors."""
    update_step(UpdateCall(rule, at, [param], [grad], [states], [out]))


def members(rule: Elementwise) -> list[Implementation]:
    """The implementations that a CPU can run for the rule."""
    found = UPDATE.implementations
    return [each for each in found if each.serves(UpdateFacts("cpu", F32, rule.name))]


def state(rule: Elementwise, size: int, seed: int = 0) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Weights, a gradient that bf16 holds exactly, and states."""
    generator = torch.Generator().manual_seed(seed + size)
    param, grad, *states = torch.randn(2 + len(rule.state_names), size, generator=generator).unbind()
    last = [states.pop().square()] if rule.name in ("adam", "adagrad") else []
    return param.clone(), grad.bfloat16().float(), [each.clone() for each in (*states, *last)]


def native(rule: Elementwise) -> Implementation:
    return next(each for each in members(rule) if each.name == "native_cpu")


def same(a: Tensor, b: Tensor) -> bool:
    """Equal in every bit, NaN included."""
    kind = {4: torch.int32, 2: torch.int16}[a.element_size()]
    nan = a.isnan() & b.isnan()
    return bool(((a.view(kind) == b.view(kind)) | nan).all())


@EVERY_RULE
def test_equals_the_formula_in_fp64_on_every_ragged_size(rule):
    for each in members(rule):
        for size in SIZES if each.name == "native_cpu" else (1, 67, 4097):
            param, grad, states = state(rule, size)
            wide = [tensor.double() for tensor in (param, grad, *states)]
            out = torch.empty(size, dtype=BF16)
            run(UPDATE.implementations[-1], rule, wide[0], wide[1], wide[2:], scale=0.5)
            run(each, rule, param, grad, states, out, scale=0.5)
            for found, wanted in zip((param, *states), (wide[0], *wide[2:]), strict=True):
                torch.testing.assert_close(found.double(), wanted, rtol=2e-6, atol=1e-6)
            assert same(out, param.bfloat16()), (each.name, size)


@NATIVE
@EVERY_RULE
def test_an_element_moves_the_same_way_wherever_it_lies(rule):
    """Whatever the cuts, offsets and threads: nothing is rounded differently at the ends of a piece."""
    size = 70_001
    param, grad, states = state(rule, size)
    whole = [param.clone(), *(each.clone() for each in states), torch.empty(size, dtype=BF16)]
    run(native(rule), rule, whole[0], grad, whole[1:-1], whole[-1], scale=0.3)
    before = torch.get_num_threads()
    try:
        for threads, cuts in (
            (1, [size]),
            (2, [size]),
            (3, [1, 3, 128, 129, 64_000, 5740]),
            (2, [35_003, 34_998]),
        ):
            torch.set_num_threads(threads)
            found = [param.clone(), *(each.clone() for each in states), torch.empty(size, dtype=BF16)]
            at = 0
            for cut in cuts:
                p, *rest, out = (tensor[at : at + cut] for tensor in found)
                run(native(rule), rule, p, grad[at : at + cut], rest, out, scale=0.3)
                at += cut
            assert at == size
            assert all(same(a, b) for a, b in zip(found, whole, strict=True)), (threads, cuts)
    finally:
        torch.set_num_threads(before)


@NATIVE
@EVERY_RULE
@over_table("width", [BF16, F16])
def test_narrow_gradients_are_widened_exactly_and_scaled_as_by_themselves(rule, width):
    """One pass gives the bits of three: widen and scale, move, round."""
    param, grad, states = state(rule, 1031)
    grad = grad.to(width)
    for scale in (1.0, 1 / 3, 2.0**-16):
        ours = [param.clone(), *(each.clone() for each in states)]
        theirs = [param.clone(), *(each.clone() for each in states)]
        out = torch.empty(1031, dtype=width)
        run(native(rule), rule, ours[0], grad, ours[1:], out, scale=scale)
        run(native(rule), rule, theirs[0], grad.float() * scale, theirs[1:])
        assert all(same(a, b) for a, b in zip(ours, theirs, strict=True))
        assert same(out, theirs[0].to(width))


@NATIVE
@over_table("width", [F32, BF16, F16])
def test_weights_are_rounded_as_torch_rounds_them_at_any_address(width):
    """Of every kind: ties, denormal numbers, what overflows in fp16, infinities; streamed and not."""
    special = [0.0, -0.0, 65504.0, 65519.9, 65520.0, -1e6, 3e38, math.inf, -math.inf, math.nan]
    tiny = [2.0**-14, 2.0**-15, 2.0**-24, 2.0**-25, 1.5 * 2.0**-25, 3e-8, 1e-40, 1e-45, 2.0**-126]
    ties = [1 + k * 2.0**-12 for k in range(64)] + [1 + k * 2.0**-9 for k in range(64)]
    values = torch.tensor(special + tiny + [-x for x in tiny] + ties)
    bits = torch.randint(-(2**31), 2**31 - 1, (4000,), generator=torch.Generator().manual_seed(0))
    param = torch.cat([values, bits.to(torch.int32).view(F32)])
    for count, offset in ((param.numel(), 0), (param.numel(), 1), ((1 << 22) + 77, 3)):
        masters = param.repeat(-(-count // param.numel()))[:count].clone()
        out = torch.full((count + 8,), 7.0, dtype=width)
        grad = torch.zeros(count)
        step(Sgd(0.0), StepFacts(1, 0.0, 0.0), masters, grad, out=out[offset : offset + count])
        assert same(out[offset : offset + count], masters.to(width))
        assert set(out[:offset].tolist()) | set(out[offset + count :].tolist()) == {7.0}


@NATIVE
def test_every_fp16_number_is_read_exactly():
    grad = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(F16)
    param = torch.zeros(grad.numel())
    step(Sgd(0.0), StepFacts(1, -1.0, 0.0), param, grad)
    assert same(param + 0.0, grad.float() + 0.0)


@NATIVE
@EVERY_RULE
def test_extreme_values_are_those_of_the_reference(rule):
    extremes = [math.inf, -math.inf, math.nan, 65504.0, 1e-40, 1e-45, 0.0, -0.0, 3e38, 1e20, -1e19, 1e-30]
    grad = torch.tensor(extremes * 3)
    for seed in range(3):
        param, _, states = state(rule, grad.numel(), seed)
        twin = [param.clone(), *(each.clone() for each in states)]
        run(native(rule), rule, param, grad, states)
        run(UPDATE.implementations[-1], rule, twin[0], grad, twin[1:])
        for found, wanted in zip((param, *states), twin, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6, equal_nan=True)


def hundred_steps(step: Callable[[Tensor, Tensor, int], None], twin: Callable[[Tensor, int], None]) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    param = torch.randn(301, generator=generator)
    for number in range(1, 101):
        grad = torch.randn(301, generator=generator) * 10.0 ** (number % 5 - 2)
        step(param, grad, number)
        twin(grad, number)
    return param


def by_class(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]):
    """A parameter in fp64 and what moves it."""
    generator = torch.Generator().manual_seed(5)
    leaf = nn.Parameter(torch.randn(301, generator=generator).double())
    optimizer = make([leaf])

    def move(grad: Tensor, number: int) -> None:
        leaf.grad = grad.double()
        optimizer.step()

    return leaf, move


def test_a_hundred_steps_equal_torchs_adamw_sgd_and_adagrad():
    m, v, u, s = (torch.zeros(301) for _ in range(4))
    cases = [
        (
            lambda p, g, t: step(Adam(0.9, 0.99), StepFacts(t, 0.01, 0.1), p, g, m, v),
            lambda leaves: torch.optim.AdamW(leaves, 0.01, (0.9, 0.99), weight_decay=0.1),
        ),
        (
            lambda p, g, t: step(Sgd(0.9), StepFacts(t, 1e-3, 0.1), p, g, u),
            lambda leaves: torch.optim.SGD(leaves, 1e-3, 0.9, weight_decay=0.1),
        ),
        (
            lambda p, g, t: step(Adagrad(), StepFacts(t, 0.01, 0.1), p, g, s),
            lambda leaves: torch.optim.Adagrad(leaves, 0.01, weight_decay=0.1),
        ),
    ]
    for ours, make in cases:
        leaf, move = by_class(make)
        found = hundred_steps(ours, move)
        torch.testing.assert_close(found.double(), leaf.detach(), rtol=2e-5, atol=2e-5)


def test_a_hundred_steps_of_lion_are_its_paper():
    """Algorithm 2 in fp64; where a sum is within rounding of zero, its sign may be either."""
    m = torch.zeros(301)
    generator = torch.Generator().manual_seed(5)
    wanted, momentum = torch.randn(301, generator=generator).double(), torch.zeros(301, dtype=F64)

    def paper(grad: Tensor, number: int) -> None:
        g = grad.double()
        wanted.sub_(0.01 * ((0.9 * momentum + (1 - 0.9) * g).sign() + 0.1 * wanted))
        momentum.mul_(0.99).add_(g, alpha=1 - 0.99)

    found = hundred_steps(lambda p, g, t: step(Lion(0.9, 0.99), StepFacts(t, 0.01, 0.1), p, g, m), paper)
    torch.testing.assert_close(found.double(), wanted, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(m.double(), momentum, rtol=2e-5, atol=2e-5)


AT, ADAM = StepFacts(1, 0.01, 0.1), Adam(0.9, 0.95)
SHAPES = ((3, 5), (1,), (0,), (1031,))


def test_the_first_step_by_hand() -> None:
    """m / (1 - b1) = g and v / (1 - b2) = g^2, so the first step is lr g / (|g| + eps) after decay."""
    param, m, v = torch.tensor([2.0]), torch.zeros(1), torch.zeros(1)
    step(ADAM, AT, param, torch.tensor([0.5]), m, v)
    assert param.item() == pytest.approx(2.0 * (1 - 0.01 * 0.1) - 0.01, rel=1e-6)
    assert m.item() == pytest.approx(0.05)
    assert v.item() == pytest.approx(0.0125)


@over_table("implementation", members(ADAM), ids=lambda each: each.name)
def test_five_steps_equal_torch_optim(implementation) -> None:
    """Gradients grow and shrink by orders of magnitude; empty and ragged tensors included."""
    torch.manual_seed(0)
    params = [torch.randn(shape) for shape in SHAPES]
    states = [(torch.zeros_like(each), torch.zeros_like(each)) for each in params]
    twins = [each.clone().requires_grad_() for each in params]
    optimizer = torch.optim.AdamW(twins, lr=0.01, betas=(0.9, 0.95), weight_decay=0.1, foreach=False)
    for number in range(1, 6):
        generator = torch.Generator().manual_seed(number)
        grads = [torch.randn(shape, generator=generator) * 10 ** (number - 3) for shape in SHAPES]
        before = [each.clone() for each in grads]
        for twin, grad in zip(twins, grads, strict=True):
            twin.grad = grad.clone()
        optimizer.step()
        outs = [None] * len(params)
        implementation.fn(UpdateCall(ADAM, StepFacts(number, 0.01, 0.1), params, grads, states, outs))
        assert all(torch.equal(a, b) for a, b in zip(grads, before, strict=True))
    for ours, twin, (m, _) in zip(params, twins, states, strict=True):
        assert torch.allclose(ours, twin, rtol=1e-5, atol=1e-6)
        if m.numel():
            assert torch.allclose(m, optimizer.state[twin]["exp_avg"], rtol=1e-5, atol=1e-6)


def test_a_late_step_needs_no_correction() -> None:
    """At step 10^6 both corrections are one: the update is m / (sqrt(v) + eps)."""
    param, m, v = torch.tensor([0.0]), torch.tensor([0.1]), torch.tensor([0.04])
    step(ADAM, StepFacts(10**6, 0.01, 0.1), param, torch.tensor([0.1]), m, v)
    assert param.item() == pytest.approx(-0.01 * 0.1 / math.sqrt(0.95 * 0.04 + 0.05 * 0.01), rel=1e-5)


def test_a_step_of_nothing() -> None:
    update_step(UpdateCall(ADAM, AT, [], [], [], []))


@NATIVE
def test_a_kernel_takes_the_names_states_and_coefficients_of_a_rule() -> None:
    param, around = torch.ones(3), update_pass(torch.ones(3), torch.ones(3), 1.0, None)
    for name, states, numbers in (("adams", 2, 6), ("adam", 1, 6), ("adam", 2, 5), ("sgd", 2, 3)):
        with pytest.raises(ValueError, match="no rule has this name"):
            KERNELS.update(name, around, address(param), [address(param)] * states, [1.0] * numbers)
    assert torch.equal(param, torch.ones(3))


class Means(Elementwise):
    """A rule of three states that nobody has compiled: it moves by the mean of three running means."""

    name = "means"
    state_names = ("fast", "slow", "slowest")

    def move(self, at: StepFacts, p: Tensor, g: Tensor, /, *states: Tensor) -> None:
        for share, mean in zip((0.5, 0.1, 0.01), states, strict=True):
            mean.lerp_(g, share)
        p.sub_(sum(states) / 3, alpha=at.lr)


@over_table("device", ["cpu", "cuda", "meta"])
def test_a_rule_without_kernels_moves_by_its_formula(device):
    rule = Means()
    assert not rule.heeds_signals(device)
    p, g, *states = torch.randn(5, 33, dtype=F32, generator=torch.Generator().manual_seed(1)).to(
        "meta" if device == "meta" else "cpu"
    )
    own = [each.clone() for each in (p, *states)]
    out = torch.empty(33, dtype=BF16, device=p.device)
    step(rule, StepFacts(1, 0.1, 0.0), p, g.bfloat16(), *states, out=out)
    if device == "meta":
        return
    rule.move(StepFacts(1, 0.1, 0.0), own[0], g.bfloat16().float(), *own[1:])
    assert all(torch.equal(a, b) for a, b in zip((p, *states), own, strict=True))
    assert torch.equal(out, p.bfloat16())
