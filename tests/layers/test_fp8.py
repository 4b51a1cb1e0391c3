"""8-bit products: the formats' rounding, the scales, and what law 1 becomes with them."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megazero.config.training_plan import training_plan_of
from megazero.config.tree.precision import PrecisionConfig
from megazero.layers import fp8
from megazero.layers.fp8 import Fp8Recipe, Fp8Scaling, Fp8State, fp8_product
from megazero.mpu.context import solo_context
from megazero.mpu.solo_group import SoloGroup
from megazero.ops import to_fp8 as casts
from megazero.ops.dispatch import Implementation
from megazero.ops.to_fp8 import TO_FP8, to_fp8, to_fp8_cuda
from megazero.train.step.timers import Timers
from megazero.verify.record import micro_batches, verification_engine
from megazero.verify.run import run_in_threads
from tests.kernels.harness import watched
from tests.layouts.layout import Layout

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ONE = torch.ones(())
INPUT, WEIGHT, GRADIENT = range(3)


def rounded(value: float, digits: int, lowest: int, largest: float) -> float:
    """To so many binary digits after the first, half to even, with subnormals below 2^lowest."""
    if value == 0:
        return 0.0
    exponent = max(math.floor(math.log2(abs(value))), lowest)
    step = 2.0 ** (exponent - digits)
    return max(-largest, min(largest, round(value / step) * step))


@pytest.mark.parametrize(
    ("dtype", "digits", "lowest", "largest"), [(E4M3, 3, -6, 448.0), (E5M2, 2, -14, 57344.0)]
)
def test_rounding_is_that_of_the_format(dtype, digits, lowest, largest):
    values = torch.cat([torch.randn(500) * 2.0**k for k in range(-18, 18, 3)])
    values = torch.cat([values, torch.tensor([0.0, 448.0, 449.0, 1e9, -1e9, 57344.0, 2.0**-9, 1.0625])])
    wanted = [rounded(value, digits, lowest, largest) for value in values.tolist()]
    (codes,), _ = to_fp8(values.view(1, -1), ONE, dtype)
    assert codes.float().tolist() == wanted


def test_what_is_not_finite_stays_visible():
    """A limit alone would turn infinity into a number, and the loss scaler would see no overflow."""
    values = torch.tensor([math.inf, -math.inf, math.nan, 1.0])
    (codes,), _ = to_fp8(values.view(1, -1), ONE, E4M3)
    assert codes.float().isnan().tolist() == [True, True, True, False]


def test_a_product_is_exact_in_its_codes():
    a, b = (torch.randn(rows, 5).to(E4M3) for rows in (3, 4))
    wanted = (a.double() @ b.double().t()) / (2.0 * 8.0)
    found = fp8_product(a, b, torch.tensor(1 / 2), torch.tensor(1 / 8), torch.float32)
    assert torch.allclose(found.double(), wanted, rtol=1e-6, atol=1e-6)


def test_torch_multiplies_the_same_numbers():
    a, b = torch.randn(16, 32).to(E5M2), torch.randn(48, 32).to(E4M3)
    scales = torch.tensor(0.5), torch.tensor(0.25)
    found = torch._scaled_mm(a, b.t(), scale_a=scales[0], scale_b=scales[1], out_dtype=torch.bfloat16)
    wanted = fp8_product(a, b, *scales, torch.bfloat16)
    assert torch.allclose(found.float(), wanted.float(), rtol=2**-7, atol=1e-6)


def scaling_of(**values):
    recipe = Fp8Recipe.of(PrecisionConfig(fp8_format="hybrid", **values))
    return Fp8Scaling("x", recipe, SoloGroup(), True, torch.device("cpu"))


def test_a_tensors_own_scale_takes_its_amax_to_the_largest_number():
    scaling = scaling_of(fp8_recipe="tensorwise", fp8_margin=1)
    cases = [
        (INPUT, [-7.0, 1.0], 448 / 7 / 2),
        (WEIGHT, [0.0, 0.0], 1.0),
        (GRADIENT, [3.5], 57344 / 3.5 / 2),
        (GRADIENT, [math.inf], 1.0),
        (GRADIENT, [1e-39], torch.finfo(torch.float32).max),
    ]
    for which, values, scale in cases:
        assert scaling.scale_of(which, torch.tensor(values)).item() == scale


def note(scaling, which, value):
    """What a product notes of a tensor with this amax; returns the scale that it used."""
    x = torch.tensor([[0.0, value]])
    scale = scaling.scale_of(which, x)
    scaling.cast(which, x, scale)
    return scale.item()


@pytest.mark.parametrize(
    ("algorithm", "scales"), [("most_recent", [224.0, 112.0, 448.0]), ("max", [224.0, 112.0, 112.0])]
)
def test_a_delayed_scale_is_that_of_earlier_steps(algorithm, scales):
    scaling = scaling_of(fp8_amax_history_len=2, fp8_amax_compute_algo=algorithm)
    state, found = Fp8State([scaling], SoloGroup()), []
    for amaxes in ([1.0, 2.0], [4.0], [1.0]):  # of the micro-batches of three steps
        before = scaling.scale[0].item()
        for amax in amaxes:
            assert note(scaling, INPUT, amax) == before
        state.advance()
        found.append(scaling.scale[0].item())
    assert found == scales
    assert scaling.scale[2].item() == 1.0  # no gradient has been seen
    assert scaling.history.shape == (2, 3)


def test_an_infinite_amax_keeps_the_scale():
    scaling = scaling_of()
    state = Fp8State([scaling], SoloGroup())
    for amax in (2.0, math.inf):
        note(scaling, INPUT, amax)
        state.advance()
    assert scaling.scale[0].item() == 224.0


def test_gradients_are_those_of_the_products():
    """With codes that hold their tensors exactly, forward and backward are a linear layer's."""
    scaling = scaling_of(fp8_recipe="tensorwise")
    x = torch.randint(-4, 5, (6, 2, 8)).float().requires_grad_()
    weight = torch.nn.Parameter(torch.randint(-4, 5, (3, 5, 8)).float())
    bias = torch.nn.Parameter(torch.randn(3, 5))
    for tensor in (x.data, weight.data):
        tensor.view(-1)[0] = 7.0  # amaxes that make the scales powers of two
    grad = torch.randint(-3, 4, (6, 2, 15)).float()
    grad.view(-1)[0] = 7.0
    y = scaling(x, weight, bias, SoloGroup(), False)
    assert torch.equal(y, torch.nn.functional.linear(x, weight.flatten(0, 1), bias.flatten()))
    y.backward(grad)
    codes = (grad * (57344 / 7)).to(E5M2).float() / (57344 / 7)
    assert torch.allclose(x.grad, codes @ weight.detach().flatten(0, 1), atol=1e-4)
    wanted = (codes.flatten(0, 1).t() @ x.detach().flatten(0, 1)).view_as(weight)
    assert torch.allclose(weight.grad, wanted, atol=1e-4)
    assert torch.equal(bias.grad, grad.sum((0, 1)).view(3, 5))


def test_an_evaluation_notes_nothing():
    scaling = scaling_of()
    weight = torch.nn.Parameter(torch.ones(2, 3))
    with torch.no_grad():
        scaling(torch.ones(1, 1, 3), weight, None, SoloGroup(), False)
    assert scaling.amax.tolist() == [0.0, 0.0, 0.0]


def test_a_state_moves_all_layers_as_each_alone():
    """Histories of three steps, in which layers, tensors and steps differ."""
    together, alone = (
        [scaling_of(fp8_amax_history_len=3, fp8_amax_compute_algo="max") for _ in range(3)] for _ in range(2)
    )
    state = Fp8State(together, SoloGroup())
    for step in range(5):
        for number, scalings in enumerate(zip(together, alone, strict=True)):
            for scaling in scalings:
                for which in range(3):
                    note(scaling, which, 2.0 ** ((3 * step + 5 * number + which) % 7))
        state.advance()
        for scaling in alone:
            Fp8State([scaling], SoloGroup()).advance()
        for one, other in zip(together, alone, strict=True):
            for name in ("scale", "history", "amax"):
                assert torch.equal(getattr(one, name), getattr(other, name)), name
    assert len({tuple(scaling.scale.tolist()) for scaling in together}) > 1
    assert together[0].history[:, 0].tolist() == [2.0**5, 2.0**2, 2.0**6]


class Launches(TorchDispatchMode):
    """Counts the operators that a GPU would run a kernel for."""

    FREE = (
        "view",
        "t",
        "transpose",
        "select",
        "slice",
        "detach",
        "empty",
        "new_empty",
        "empty_like",
        "alias",
    )
    FREE += ("alias", "unsqueeze", "expand", "_unsafe_view", "unbind", "split")

    def __init__(self):
        super().__init__()
        self.names = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name not in self.FREE:
            self.names[name] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """What a GPU is given, with the kernel of casts on the CPU and torch's own product; counts the casts."""
    library, calls = watched(), []

    def kernel(*arguments):
        calls.append(arguments[0].shape)
        return to_fp8_cuda(*arguments, kernels=library)

    rows = (Implementation("cuda", kernel), TO_FP8.implementations[-1])
    monkeypatch.setattr(casts, "TO_FP8", replace(TO_FP8, implementations=rows))
    monkeypatch.setattr(fp8, "on_tensor_cores", lambda x: True)
    return calls


def operands(dtype=torch.bfloat16, tokens=(16, 2), n=48, k=32):
    g = torch.Generator().manual_seed(3)
    randn = lambda *shape: torch.randn(*shape, generator=g).to(dtype)  # noqa: E731
    x, grad = randn(*tokens, k).requires_grad_(), randn(*tokens, n)
    return x, torch.nn.Parameter(randn(n, k)), torch.nn.Parameter(randn(n)), grad


def test_launches_of_a_linear(as_on_a_gpu):
    """It was 25 forward and 26 backward for each micro-batch, and 15 a step for each layer."""
    scaling = scaling_of()
    x, weight, bias, grad = operands()
    counts = []
    with Fp8State([scaling], SoloGroup()).passes():
        for _ in range(2):
            with Launches() as forward:
                y = scaling(x, weight, bias, SoloGroup(), False)
            counts.append((dict(forward.names), len(as_on_a_gpu)))
            with Launches() as backward:
                torch.autograd.grad(y, [x, weight, bias], grad)
            counts.append((dict(backward.names), len(as_on_a_gpu)))
    ahead, back = {"_scaled_mm": 1, "add": 1}, {"_scaled_mm": 2, "sum": 1}
    assert counts == [(ahead, 2), (back, 3), (ahead, 4), (back, 5)], "casts are counted on"


@pytest.mark.parametrize("layers", [1, 50])
def test_launches_of_a_steps_end(layers):
    state = Fp8State([scaling_of() for _ in range(layers)], SoloGroup())
    with Launches() as launches:
        state.advance()
        with state.passes():
            pass
    assert launches.names.total() == 20


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("sizes", [{}, {"tokens": (5, 1), "n": 7, "k": 9}])
def test_a_gpu_multiplies_the_same_codes(as_on_a_gpu, monkeypatch, sizes, kept):
    """Transposed codes from the kernel, padding where sizes are odd, kept or made again."""

    def run(scaling, x, weight, bias, grad):
        state = Fp8State([scaling], SoloGroup())
        scaling.keeps = kept
        found = []
        for _ in range(2):
            with state.passes():
                y = scaling(x, weight, bias, SoloGroup(), False)
                found += [y, *torch.autograd.grad(y, [x, weight, bias], grad)]
            state.advance()
        return [*found, scaling.scale]

    on_gpu = run(scaling_of(), *operands(**sizes))
    assert as_on_a_gpu
    monkeypatch.undo()
    for ours, theirs in zip(on_gpu, run(scaling_of(), *operands(**sizes)), strict=True):
        close = 2**-6 * theirs.abs().max().item()
        assert torch.allclose(ours.float(), theirs.float(), rtol=2**-6, atol=close)


def casts_of(scaling, monkeypatch):
    """The tensors that are cast from now on, by what they are."""
    found, cast = [], scaling.cast
    monkeypatch.setattr(
        scaling, "cast", lambda which, *a, **k: (found.append(which), cast(which, *a, **k))[1]
    )
    return found


def test_codes_of_a_weight_are_kept_for_the_passes_of_a_step_alone(monkeypatch):
    """Whatever changes a weight does so between steps; there nothing of an earlier one is left to be used."""
    scaling = scaling_of()
    state, made = Fp8State([scaling], SoloGroup()), casts_of(scaling, monkeypatch)
    x, weight, _, grad = operands(torch.float32)

    def results():
        y = scaling(x, weight, None, SoloGroup(), False)
        return [y.detach(), *torch.autograd.grad(y, [x, weight], grad)]

    with state.passes():
        first = results()
        assert all(torch.equal(a, b) for a, b in zip(first, results(), strict=True))
    assert made == [WEIGHT, INPUT, GRADIENT, INPUT, GRADIENT]
    weight.data.view(-1)[0] += 1  # no counter of autograd sees this, nor what a kernel writes
    assert scaling.kept is None
    assert not torch.equal(results()[0], first[0])

    def interrupted():
        with state.passes():
            results()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        interrupted()
    assert scaling.kept is None
    weight.data.view(-1)[0] -= 1
    with state.passes():
        assert all(torch.equal(a, b) for a, b in zip(first, results(), strict=True))


def test_the_amax_of_a_kept_weight_is_noted_even_if_the_first_pass_has_no_gradients():
    """Such a pass is one that is recomputed later."""
    scaling = scaling_of()
    x, weight, _, _ = operands(torch.float32)
    with Fp8State([scaling], SoloGroup()).passes():
        with torch.no_grad():
            scaling(x, weight, None, SoloGroup(), False)
        assert scaling.amax.tolist() == [0.0, weight.abs().max().item(), 0.0]


def test_layers_at_the_ends_may_stay_out():
    values = {"fp8_format": "e4m3", "first_last_layers_bf16": True, "num_layers_at_end_in_bf16": 2}
    assert PrecisionConfig(**values).layers_in_16_bits(6) == {0, 4, 5}
    assert PrecisionConfig(fp8_format="e4m3").layers_in_16_bits(6) == set()
    assert PrecisionConfig().layers_in_16_bits(2) == {0, 1}


BASE = Layout(samples=4)
SAME = (
    Layout(tp=2, sequence_parallel=True, zero=1),
    Layout(tp=2, pp=2),
    Layout(dp=2, zero=3, recompute="full"),
)


def trained(layout):
    return run_in_threads(layout.config(3), layout.grid, 3)


@pytest.fixture(scope="module")
def alone():
    return {each: trained(replace(BASE, fp8=each))[0] for each in ("tensorwise", "delayed")}


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
@pytest.mark.parametrize("layout", [*SAME, Layout(micro_batch=4)], ids=lambda layout: layout.name)
def test_a_layout_trains_like_one_process(alone, layout, recipe):
    """The amax of a tensor in parts is that of the whole. `tensorwise` alone depends on the micro-batch."""
    if layout.micro_batch > 1 and recipe == "tensorwise":
        pytest.skip("a scale is that of a micro-batch")
    wanted = alone[recipe]
    for found in trained(replace(layout, fp8=recipe, samples=4)):
        for mine, its in zip(found.losses, wanted.losses, strict=True):
            assert mine["lm loss"] == pytest.approx(its["lm loss"], abs=1e-5)
        for mine, its in zip(found.gradients, wanted.gradients, strict=True):
            for name in mine.keys() & its.keys():
                difference, size = (mine[name] - its[name]).norm(), its[name].norm()
                assert difference <= 2e-3 * size + 1e-6, name


def test_it_learns_nearly_what_wide_products_do(alone):
    wide = trained(BASE)[0].losses
    for record in alone.values():
        differences = [abs(a["lm loss"] - b["lm loss"]) for a, b in zip(record.losses, wide, strict=True)]
        assert 1e-5 < max(differences) < 0.02


@pytest.mark.parametrize(
    "layout",
    [Layout(samples=4), Layout(samples=4, zero=3, dp=2), Layout(samples=4, recompute="full", pp=2)],
    ids=lambda layout: layout.name,
)
def test_kept_codes_are_those_that_each_micro_batch_would_make(monkeypatch, layout):
    layout = replace(layout, fp8="delayed", micro_batch=1)
    kept = trained(layout)
    casts_made = Counter()
    cast = Fp8Scaling.cast

    def counted(scaling, which, *arguments, **more):
        casts_made[which] += 1
        return cast(scaling, which, *arguments, **more)

    monkeypatch.setattr(Fp8Scaling, "cast", counted)
    trained(layout)
    with_codes = casts_made[WEIGHT]
    casts_made.clear()
    monkeypatch.setattr(Fp8Scaling, "weight_codes", lambda scaling, weight: None)
    made_anew = trained(layout)
    assert (with_codes < casts_made[WEIGHT]) == (layout.zero < 3), "stage 3 lets go of weights, and of codes"
    for ours, theirs in zip(kept, made_anew, strict=True):
        assert ours.losses == theirs.losses
        for mine, its in zip(ours.gradients, theirs.gradients, strict=True):
            assert all(torch.equal(mine[name], its[name]) for name in mine)


def test_no_step_evaluation_or_written_weight_meets_codes_of_an_earlier_one():
    """An engine that evaluates, repeats an attempt, holds an update and has its weights written to."""
    layout = Layout(samples=4, fp8="delayed")
    config = layout.config(6)
    plan, context = training_plan_of(config, 6), solo_context()
    engines = [verification_engine(config, plan, context) for _ in range(2)]
    for scaling in engines[1].fp8.scalings:
        scaling.keeps = False
    seen = [[], []]
    for engine, record in zip(engines, seen, strict=True):
        for number in range(4):
            progress = plan.before(number)
            batches = micro_batches(config, context, plan.at(progress))
            engine.attempt(batches, progress, Timers())
            attempt = engine.attempt(batches, progress, Timers())
            result = engine.update(attempt, progress, Timers(), hold=number == 2)
            record.append((result.losses.total, result.grad_norm))
            record.append(engine.evaluate([batches]).losses.total)
            with engine.executor.sharding.gathered(write_back=True):
                for chunk in engine.executor.chunks.values():
                    for param in chunk.parameters():
                        param.data.mul_(1.0 + 2.0**-6)
            record.append(engine.evaluate([batches]).losses.total)
    assert seen[0] == seen[1]
    assert len(set(map(str, seen[0]))) == len(seen[0])


@pytest.fixture
def forgotten():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_layers_multiply_the_same_codes(forgotten, backend, recipe):
    """They are within the regions: one graph serves all layers and micro-batches, without a break."""
    layout = Layout(samples=4, micro_batch=1, fp8=recipe)
    plain = trained(layout)[0]
    torch._dynamo.utils.counters.clear()
    compiled = trained(replace(layout, compiled=backend))[0]
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    for ours, theirs in zip(compiled.losses, plain.losses, strict=True):
        assert ours["lm loss"] == pytest.approx(theirs["lm loss"], abs=1e-5)
    for mine, its in zip(compiled.gradients, plain.gradients, strict=True):
        for name in its:
            assert (mine[name] - its[name]).norm() <= 2e-3 * its[name].norm() + 1e-6, name


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_linear_has_the_bits_of_a_plain_one(forgotten, backend):
    x, weight, bias, grad = operands(torch.float32)
    found = []
    for compiles in (False, True):
        scaling = scaling_of()
        product = partial(scaling, weight=weight, bias=bias, group=SoloGroup(), sequence_parallel=False)
        run = torch.compile(product, backend=backend, fullgraph=True) if compiles else product
        state = Fp8State([scaling], SoloGroup())
        for _ in range(2):
            with state.passes():
                scaling.weight_codes(weight)
                y = run(x)
                found.append(
                    [y.detach(), *torch.autograd.grad(y, [x, weight, bias], grad), scaling.amax.clone()]
                )
            state.advance()
    for ours, theirs in zip(found[2:], found[:2], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert all(amax > 0 for amax in found[2][-1].tolist())


def test_devices_before_ada_multiply_the_codes_in_fp32(monkeypatch):
    """On an A100 the first product of 8-bit floats ended the training."""
    x = SimpleNamespace(is_cuda=True, device=torch.device("cuda"))
    for capability, cores in (((8, 0), False), ((8, 6), False), ((8, 9), True), ((9, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, own=capability: own)
        assert fp8.on_tensor_cores(x) is cores
    assert not fp8.on_tensor_cores(torch.zeros(1))
