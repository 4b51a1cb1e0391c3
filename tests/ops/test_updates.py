"""One pass of an optimizer: the formula of every implementation, and what the compiled one keeps."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from megazero.ops import Implementation, Operator
from megazero.ops.adagrad import ADAGRAD, adagrad_step
from megazero.ops.adam import ADAM, adam_step
from megazero.ops.lamb import LAMB_MOVE, LAMB_NORMS, lamb_move, lamb_norms
from megazero.ops.lion import LION, lion_step
from megazero.ops.native import available
from megazero.ops.sgd import SGD, sgd_step

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
SIZES = (*range(1, 71), 127, 128, 129, 1023, 4097)
NATIVE = pytest.mark.skipif(not available(), reason="the compiled kernels are not built")


@dataclass(frozen=True)
class PassRow:
    """An optimizer's pass.

    Attributes:
        operator: its table.
        moments: how many it has.
        step: the public function, of single tensors: (param, grad, moments, weights, scale, decay).
        settings: further arguments of the implementations.
        lists: whether these take lists.
    """

    operator: Operator
    moments: int
    settings: dict[str, float]
    lists: bool = False

    def run(
        self,
        each: Implementation,
        param: Tensor,
        grad: Tensor,
        moments: list[Tensor],
        weights: Tensor | None = None,
        scale: float = 1.0,
        decay: float = 0.1,
    ) -> None:
        """One step by one implementation."""
        tensors = [param, grad, *moments, *[None] * (self.operator is SGD and not moments), weights]
        arguments = [[tensor] for tensor in tensors] if self.lists else tensors
        each.fn(*arguments, **self.settings, weight_decay=decay, scale=scale)


ADAM_ROW = PassRow(ADAM, 2, {"step": 3, "lr": 0.01, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8}, lists=True)
ROWS = {
    "adam": ADAM_ROW,
    "lion": PassRow(LION, 1, {"lr": 0.01, "beta1": 0.9, "beta2": 0.99}),
    "adagrad": PassRow(ADAGRAD, 1, {"lr": 0.01, "eps": 1e-10}),
    "sgd": PassRow(SGD, 0, {"lr": 0.01, "momentum": 0.0}),
    "sgd with momentum": PassRow(SGD, 1, {"lr": 0.01, "momentum": 0.9}),
}
EVERY_ROW = pytest.mark.parametrize("row", ROWS.values(), ids=ROWS.keys())


def state(row: PassRow, size: int, seed: int = 0) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Weights, a gradient that bf16 holds exactly, and moments."""
    generator = torch.Generator().manual_seed(seed + size)
    param, grad, *moments = torch.randn(2 + row.moments, size, generator=generator).unbind()
    last = [moments.pop().square()] if row.moments == 2 or row.operator is ADAGRAD else []
    return param.clone(), grad.bfloat16().float(), [each.clone() for each in (*moments, *last)]


def native(row: PassRow) -> Implementation:
    return next(each for each in row.operator.implementations if each.name == "native_cpu")


def same(a: Tensor, b: Tensor) -> bool:
    """Equal in every bit, NaN included."""
    kind = {4: torch.int32, 2: torch.int16}[a.element_size()]
    nan = a.isnan() & b.isnan()
    return bool(((a.view(kind) == b.view(kind)) | nan).all())


@EVERY_ROW
def test_equals_the_formula_in_fp64_on_every_ragged_size(row):
    for each in row.operator.implementations:
        if each.name == "cuda" or (each.name == "native_cpu" and not available()):
            continue
        for size in SIZES if each.name == "native_cpu" else (1, 67, 4097):
            param, grad, moments = state(row, size)
            wide = [tensor.double() for tensor in (param, grad, *moments)]
            out = torch.empty(size, dtype=BF16)
            reference = row.operator.implementations[-1]
            row.run(reference, wide[0], wide[1], wide[2:], scale=0.5)
            row.run(each, param, grad, moments, out, scale=0.5)
            for found, wanted in zip((param, *moments), (wide[0], *wide[2:]), strict=True):
                torch.testing.assert_close(found.double(), wanted, rtol=2e-6, atol=1e-6)
            assert same(out, param.bfloat16()), (each.name, size)


@NATIVE
@EVERY_ROW
def test_an_element_moves_the_same_way_wherever_it_lies(row):
    """Whatever the cuts, offsets and threads: nothing is rounded differently at the ends of a piece."""
    size = 70_001
    param, grad, moments = state(row, size)
    whole = [param.clone(), *(each.clone() for each in moments), torch.empty(size, dtype=BF16)]
    row.run(native(row), whole[0], grad, whole[1:-1], whole[-1], scale=0.3)
    before = torch.get_num_threads()
    try:
        for threads, cuts in (
            (1, [size]),
            (2, [size]),
            (3, [1, 3, 128, 129, 64_000, 5740]),
            (2, [35_003, 34_998]),
        ):
            torch.set_num_threads(threads)
            found = [param.clone(), *(each.clone() for each in moments), torch.empty(size, dtype=BF16)]
            at = 0
            for cut in cuts:
                p, *rest, out = (tensor[at : at + cut] for tensor in found)
                row.run(native(row), p, grad[at : at + cut], rest, out, scale=0.3)
                at += cut
            assert at == size
            assert all(same(a, b) for a, b in zip(found, whole, strict=True)), (threads, cuts)
    finally:
        torch.set_num_threads(before)


@NATIVE
@EVERY_ROW
@pytest.mark.parametrize("width", [BF16, F16])
def test_narrow_gradients_are_widened_exactly_and_scaled_as_by_themselves(row, width):
    """One pass gives the bits of three: widen and scale, move, round."""
    param, grad, moments = state(row, 1031)
    grad = grad.to(width)
    for scale in (1.0, 1 / 3, 2.0**-16):
        ours = [param.clone(), *(each.clone() for each in moments)]
        theirs = [param.clone(), *(each.clone() for each in moments)]
        out = torch.empty(1031, dtype=width)
        row.run(native(row), ours[0], grad, ours[1:], out, scale=scale)
        row.run(native(row), theirs[0], grad.float() * scale, theirs[1:])
        assert all(same(a, b) for a, b in zip(ours, theirs, strict=True))
        assert same(out, theirs[0].to(width))


@NATIVE
@pytest.mark.parametrize("width", [F32, BF16, F16])
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
        sgd_step(masters, grad, None, out[offset : offset + count], lr=0.0, momentum=0.0, weight_decay=0.0)
        assert same(out[offset : offset + count], masters.to(width))
        assert set(out[:offset].tolist()) | set(out[offset + count :].tolist()) == {7.0}


@NATIVE
def test_every_fp16_number_is_read_exactly():
    grad = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(F16)
    param = torch.zeros(grad.numel())
    sgd_step(param, grad, None, lr=-1.0, momentum=0.0, weight_decay=0.0)
    assert same(param + 0.0, grad.float() + 0.0)


@NATIVE
@EVERY_ROW
def test_extreme_values_are_those_of_the_reference(row):
    extremes = [math.inf, -math.inf, math.nan, 65504.0, 1e-40, 1e-45, 0.0, -0.0, 3e38, 1e20, -1e19, 1e-30]
    grad = torch.tensor(extremes * 3)
    for seed in range(3):
        param, _, moments = state(row, grad.numel(), seed)
        twin = [param.clone(), *(each.clone() for each in moments)]
        row.run(native(row), param, grad, moments)
        row.run(row.operator.implementations[-1], twin[0], grad, twin[1:])
        for found, wanted in zip((param, *moments), twin, strict=True):
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
    adam = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8}
    cases = [
        (
            lambda p, g, t: adam_step([p], [g], [m], [v], step=t, lr=0.01, weight_decay=0.1, **adam),
            lambda leaves: torch.optim.AdamW(leaves, 0.01, (0.9, 0.99), weight_decay=0.1),
        ),
        (
            lambda p, g, t: sgd_step(p, g, u, lr=1e-3, momentum=0.9, weight_decay=0.1),
            lambda leaves: torch.optim.SGD(leaves, 1e-3, 0.9, weight_decay=0.1),
        ),
        (
            lambda p, g, t: adagrad_step(p, g, s, lr=0.01, eps=1e-10, weight_decay=0.1),
            lambda leaves: torch.optim.Adagrad(leaves, 0.01, weight_decay=0.1),
        ),
    ]
    for step, make in cases:
        leaf, move = by_class(make)
        found = hundred_steps(step, move)
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

    found = hundred_steps(
        lambda p, g, t: lion_step(p, g, m, lr=0.01, beta1=0.9, beta2=0.99, weight_decay=0.1), paper
    )
    torch.testing.assert_close(found.double(), wanted, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(m.double(), momentum, rtol=2e-5, atol=2e-5)


@NATIVE
@pytest.mark.parametrize("width", [BF16, F16])
def test_lamb_reads_and_writes_what_is_narrow_in_its_two_passes(width):
    generator = torch.Generator().manual_seed(1)
    for size in (1, 67, 128, 1023, 40_001):
        p, g, m, v = torch.randn(4, size, generator=generator).unbind()
        g, v = g.to(width), v.square()
        settings = {"factor": 1.5, "eps": 1e-6, "weight_decay": 0.1}
        found, wanted = ([each.clone() for each in (p, m, v)] for _ in range(2))
        norms, move = (each.implementations[0].fn for each in (LAMB_NORMS, LAMB_MOVE))
        betas = {"beta1": 0.9, "beta2": 0.99}
        mine = norms(found[0], g, *found[1:], **betas, **settings, scale=0.3)
        theirs = norms(wanted[0], g.float() * 0.3, *wanted[1:], **betas, **settings)
        assert torch.equal(mine, theirs)
        out = torch.empty(size, dtype=width)
        move(*found, torch.tensor(0.01), out, **settings)
        move(*wanted, torch.tensor(0.01), **settings)
        assert all(same(a, b) for a, b in zip(found, wanted, strict=True))
        assert same(out, found[0].to(width))
        exact = [each.double() for each in (p, m, v)]
        truth = LAMB_NORMS.reference(exact[0], g.double(), *exact[1:], **betas, **settings, scale=0.3)
        lamb_move(*exact, torch.tensor(0.01, dtype=F64), **settings)
        torch.testing.assert_close(mine, truth, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(found[0].double(), exact[0], rtol=2e-6, atol=1e-6)


@NATIVE
def test_an_element_under_lamb_moves_the_same_way_wherever_it_lies():
    size = 5003
    start = list(torch.randn(4, size, generator=torch.Generator().manual_seed(1)).unbind())
    start[3] = start[3].square()
    settings = {"factor": 1.5, "eps": 1e-6, "weight_decay": 0.1}
    runs = []
    for cuts in ([size], [1] * size, [128, 129, 4746], [3] * 1667 + [2]):
        p, g, m, v = (each.clone() for each in start)
        at = 0
        for cut in cuts:
            parts = [each[at : at + cut] for each in (p, g, m, v)]
            lamb_norms(*parts, beta1=0.9, beta2=0.99, scale=0.3, **settings)
            lamb_move(parts[0], parts[2], parts[3], torch.tensor(0.01), **settings)
            at += cut
        assert at == size
        runs.append((p, m, v))
    for found in runs[1:]:
        assert all(same(a, b) for a, b in zip(found, runs[0], strict=True))
