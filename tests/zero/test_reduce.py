"""Gradient sums: over micro-batches, chunks, replicas, slices of a sequence and the ends of a pipeline."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from megazero.mpu.context import solo_context, thread_context
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.param_spec import Cut, InitialValues, ParamSpec
from megazero.mpu.thread_group import ThreadWorld
from megazero.optim.elementwise import Adam, Sgd
from megazero.zero.build import build_store
from megazero.zero.optimizer import Optimizer
from megazero.zero.parallel import DataParallel
from megazero.zero.policy import ZeroPolicy
from megazero.zero.reduce import GradientReducer
from megazero.zero.store.device import DeviceStore
from megazero.zero.table import STAGES
from megazero.zero.unit import Unit, module_units
from tests.tables import over_table
from tests.zero.harness import Trainer, in_threads
from tests.zero.late_group import with_spies
from tests.zero.models import Zoo, zoo_loss
from tests.zero.policies import make_policy
from tests.zero.sleeping_store import SleepingStore

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
EVERY_STAGE = over_table("stage", range(len(STAGES)))
EVERY_STORE = over_table("kind", [DeviceStore, SleepingStore])


def parameter(name: str, values: list[float], dtype=F32, **changes) -> nn.Parameter:
    param = nn.Parameter(torch.tensor(values, dtype=dtype))
    param.spec = ParamSpec(name, tuple(param.shape), InitialValues("zeros"), **changes)
    return param


class Times(nn.Module):
    """x -> sum(weight) x."""

    def __init__(self, weight: nn.Parameter):
        super().__init__()
        self.weight = weight

    def forward(self, x):
        return x * self.weight.sum()


def build(modules, policy, context, chunks=None, kind=DeviceStore):
    chunks = chunks or [0] * len(modules)
    units = [
        unit for chunk, module in zip(chunks, modules, strict=True) for unit in module_units(module, chunk)
    ]
    store = build_store(units, policy, context, kind=kind)
    return DataParallel(units, store, policy, context), Optimizer(store, Sgd(0.0), context, 0.0)


def policy(stage: int, **changes) -> ZeroPolicy:
    return make_policy(stage, **{"persistence_threshold": 0, "max_live": 0, **changes})


def gradients(optimizer) -> dict[str, list[float]]:
    return {spec.name: grad.tolist() for spec, grad in optimizer.full_gradients()}


def backward(parallel, chunk: int, loss, *, reduce: bool) -> None:
    parallel.begin_backward(chunk, reduce=reduce)
    loss.backward()
    parallel.end_backward()


def test_an_unused_parameter_has_gradient_zero_every_step():
    used, unused = Times(parameter("used", [1.0, 2.0])), Times(parameter("unused", [7.0]))
    parallel, optimizer = build([used, unused], policy(0), solo_context())
    for step in range(2):
        optimizer.store.sums(optimizer.store.buckets[0]).fill_(99.0)  # what an earlier step might have left
        parallel.start()
        for last in (False, True):
            backward(parallel, 0, used(torch.tensor(step + 1.0)), reduce=last)
        parallel.finish()
        assert gradients(optimizer) == {"used": [2.0 * (step + 1)] * 2, "unused": [0.0]}


@EVERY_STAGE
def test_a_step_without_any_backward_has_gradients_zero(stage):
    def work(context):
        layer = Times(parameter("w", [1.0] * 3))
        parallel, optimizer = build([layer], policy(stage), context)
        for work in ([1.0, 1.0], []):
            parallel.start()
            for x in work:
                backward(parallel, 0, layer(torch.tensor(x)), reduce=True)
            parallel.finish()
        return gradients(optimizer)

    assert in_threads(2, work) == [{"w": [0.0] * 3}] * 2


@pytest.mark.parametrize(
    ("stage", "accumulation"), [*((stage, F32) for stage in range(len(STAGES))), (1, BF16)]
)
def test_a_thousand_bf16_micro_batches(stage, accumulation):
    """A bf16 sum sticks where an increment is below half its last digit: at 256 for ones."""

    def work(context):
        layer = Times(parameter("w", [1.0] * 5, BF16))
        settings = policy(stage, accumulation_dtype=accumulation)
        parallel, optimizer = build([layer], settings, context)
        parallel.start()
        for i in range(1000):
            x = torch.tensor(1.0 + i % 7 / 8, dtype=BF16)
            backward(parallel, 0, layer(x), reduce=STAGES[stage].shard_grads or i == 999)
        parallel.finish()
        return next(grad for _, grad in optimizer.full_gradients())

    exact = 2 * sum(1.0 + i % 7 / 8 for i in range(1000))
    for grad in in_threads(2, work):
        assert grad.dtype == accumulation
        if accumulation == F32:
            assert grad.tolist() == [exact] * 5
        else:
            assert grad.max() < exact / 2


@EVERY_STAGE
@over_table("reduce_dtype", [F32, BF16, F16])
def test_gradients_travel_in_the_wanted_dtype(stage, reduce_dtype):
    def work(context):
        calls = []
        settings = policy(stage, reduce_dtype=reduce_dtype)
        trainer = Trainer(Zoo(), zoo_loss, settings, with_spies(context, calls))
        trainer.accumulate(0, 2)
        travelled = {dtype for operation, dtype, _ in calls if operation != "all_gather"}
        return travelled, {s.name: g for s, g in trainer.optimizer.full_gradients()}

    def exact(context):
        trainer = Trainer(Zoo(), zoo_loss, policy(stage), context)
        trainer.accumulate(0, 2)
        return {s.name: g for s, g in trainer.optimizer.full_gradients()}

    wanted = in_threads(2, exact)[0]
    for travelled, found in in_threads(2, work):
        assert travelled == {reduce_dtype}
        different = False
        for name, grad in found.items():
            scale = wanted[name].abs().max() if grad.numel() else 0.0
            torch.testing.assert_close(grad, wanted[name], rtol=0.0, atol=float(scale) * 2**-7)
            different |= not torch.equal(grad, wanted[name])
        assert different == (reduce_dtype != F32)


@EVERY_STAGE
@over_table("reentrant", [True, False])
def test_a_module_that_two_checkpoints_use(stage, reentrant):
    """Reentrant checkpoints bring its gradient twice, the second time after its bucket has been reduced."""

    def work(context):
        layer = nn.Linear(3, 3)
        with torch.no_grad():
            layer.weight.copy_(torch.arange(9.0).view(3, 3) / 9)
            layer.bias.fill_(0.5)
        parallel, optimizer = build([layer], policy(stage, bucket_size=1), context)
        parallel.start()
        for i in range(2):
            x = torch.ones(2, 3, requires_grad=True) * (context.rank + 1 + i)
            for _ in range(2):
                x = torch.tanh(checkpoint(layer, x, use_reentrant=reentrant))
            backward(parallel, 0, x.sum(), reduce=STAGES[stage].shard_grads or i == 1)
        parallel.finish()
        return gradients(optimizer)

    layer = nn.Linear(3, 3)
    with torch.no_grad():
        layer.weight.copy_(torch.arange(9.0).view(3, 3) / 9)
        layer.bias.fill_(0.5)
    for scale in (1.0, 2.0, 2.0, 3.0):
        torch.tanh(layer(torch.tanh(layer(torch.ones(2, 3) * scale)))).sum().backward()
    for found in in_threads(2, work):
        torch.testing.assert_close(torch.tensor(found["weight"]), layer.weight.grad)
        torch.testing.assert_close(torch.tensor(found["bias"]), layer.bias.grad)


@EVERY_STAGE
@over_table("late", [True, False])
def test_one_parameter_in_two_chunks_of_a_rank(stage, late):
    """A head tied to an embedding of another chunk; a split backward may bring its gradient last."""

    def work(context):
        shared = parameter("shared", [1.0, 2.0, 3.0])
        first, last = Times(shared), Times(shared)
        other = Times(parameter("other", [1.0]))
        parallel, optimizer = build([first, other, last], policy(stage), context, [0, 1, 1])
        every = STAGES[stage].shard_grads
        parallel.start()
        for i in range(2):
            x = torch.tensor(context.rank + 1.0 + i)
            losses = {0: first(x), 1: last(10 * x) + other(x)}
            for chunk in (0, 1) if late else (1, 0):
                backward(parallel, chunk, losses[chunk], reduce=every or i == 1)
        parallel.finish()
        return gradients(optimizer)

    total = 1 + 2 + 2 + 3
    assert in_threads(2, work) == [{"shared": [11.0 * total] * 3, "other": [1.0 * total]}] * 2


@EVERY_STAGE
def test_a_backward_in_two_parts(stage):
    """Weight gradients that are computed later are handed over by hand, and complete the bucket then."""

    def work(context):
        a, b = parameter("a", [1.0, 1.0]), parameter("b", [1.0, 1.0])
        layers = [Times(a), Times(b)]
        parallel, optimizer = build(layers, policy(stage), context)
        parallel.start()
        for i in range(2):
            loss = layers[1](layers[0](torch.tensor(context.rank + 1.0))) - layers[1].weight.detach().sum()
            parallel.begin_backward(0, reduce=False, ends=False)
            loss.backward(inputs=[a])
            parallel.end_backward()
            parallel.begin_backward(0, reduce=STAGES[stage].shard_grads or i == 1)
            b.grad = torch.full((2,), 2.0 * (context.rank + 1))
            parallel.collect(b)
            parallel.end_backward()
            assert b.grad is None
        parallel.finish()
        return gradients(optimizer)

    # Each: 2 micro-batches x (1 + 2 over the ranks) x 2 elements of the other layer.
    assert in_threads(2, work) == [{"a": [12.0] * 2, "b": [12.0] * 2}] * 2


@pytest.mark.parametrize("stage", [2, 3])
def test_what_an_early_half_brings_waits_for_its_bucket(stage):
    """Two micro-batches' biases come first; the reductions still start in order as the weights come."""

    def work(context):
        calls = []
        weights = [parameter(f"w{i}", [1.0, 1.0]) for i in range(3)]
        biases = [parameter(f"b{i}", [1.0]) for i in range(3)]
        pairs = zip(weights, biases, strict=True)
        units = [Unit(0, nn.Module(), pair) for pair in pairs]
        settings = policy(stage, bucket_size=3)
        store = build_store(units, settings, context := with_spies(context, calls))
        parallel = DataParallel(units, store, settings, context)

        def bring(param, value):
            param.grad = torch.full(param.shape, value)
            parallel.collect(param)

        parallel.start()
        for value in (1.0, 10.0):
            parallel.begin_backward(0, reduce=False, ends=False)
            for bias in reversed(biases):
                bring(bias, value)
            parallel.end_backward()
        assert calls == []
        seen = []
        for value in (2.0, 20.0):
            parallel.begin_backward(0, reduce=True)
            for i in (2, 0, 1):  # the first bucket to be reduced holds the last unit
                bring(weights[i], value)
                seen.append(len(calls))
            parallel.end_backward()
        parallel.finish()
        assert len(calls) == 6
        grads = {s.name: g.tolist() for s, g in Optimizer(store, Sgd(0.0), context, 0.0).full_gradients()}
        return seen, grads

    expected = {f"w{i}": [44.0] * 2 for i in range(3)} | {f"b{i}": [22.0] for i in range(3)}
    assert in_threads(2, work) == [([1, 1, 3, 4, 4, 6], expected)] * 2


@pytest.mark.parametrize("reduce_dtype", [F32, BF16])
def test_what_waits_is_summed_as_in_a_buffer(reduce_dtype):
    """In the dtype of the buffers, gradient by gradient, whatever comes first."""
    values = [1.0, 2.0**-8, 2.0**-8]

    def work(context):
        param, other = parameter("p", [0.0]), parameter("q", [0.0])
        unit = Unit(0, nn.Module(), (param, other))
        settings = policy(2, reduce_dtype=reduce_dtype)
        store = build_store([unit], settings, context)
        parallel = DataParallel([unit], store, settings, context)
        parallel.start()
        for i, value in enumerate(values):
            last = i == len(values) - 1
            parallel.begin_backward(0, reduce=last)
            for each in (param, other) if last else (param,):
                each.grad = torch.tensor([value])
                parallel.collect(each)
            parallel.end_backward()
        parallel.finish()
        return gradients(Optimizer(store, Sgd(0.0), context, 0.0))["p"]

    # In bf16 neither small number moves the sum; their sum would.
    assert in_threads(2, work) == [[2.0 if reduce_dtype == BF16 else 2.0 + 2.0**-6]] * 2


@EVERY_STAGE
def test_reductions_may_start_after_the_backward(stage):
    def work(context):
        calls, counts = [], []
        layer = Times(parameter("w", [1.0] * 3))
        parallel, optimizer = build([layer], policy(stage), with_spies(context, calls))

        def count() -> None:
            counts.append(sum(operation != "all_gather" for operation, *_ in calls))

        parallel.start()
        for i in range(2):
            backward(parallel, 0, layer(torch.tensor(context.rank + 1.0 + i)), reduce=False)
            count()
            if i == 1 or STAGES[stage].shard_grads:
                parallel.reduce(0)
            count()
        parallel.finish()
        return counts, gradients(optimizer)

    counts = [0, 1, 1, 2] if STAGES[stage].shard_grads else [0, 0, 0, 1]
    assert in_threads(2, work) == [(counts, {"w": [8.0] * 3})] * 2


@EVERY_STORE
@EVERY_STAGE
def test_sums_over_the_sequence_come_once(stage, kind):
    """Tensor-parallel rank r has gradient r + 1 of a replicated parameter whose inputs it has a part of."""

    def rank(world):
        def work(r):
            context = thread_context(world, ProcessGrid(dp=2, tp=2), r)
            sliced = parameter("sliced", [1.0] * 3, cuts=(Cut(0, "tp"),))
            sliced.spec = replace(sliced.spec, shape=(6,))
            parts = [
                Times(parameter("partial", [1.0] * 3, partial_grad=True)),
                Times(parameter("replicated", [1.0] * 3)),
                Times(sliced),
            ]
            parallel, optimizer = build(parts, policy(stage), context, kind=kind)
            parallel.start()
            inputs = (
                torch.tensor(context.tp.rank + 1.0),
                torch.tensor(5.0),
                torch.tensor(context.tp.rank * 1.0),
            )
            loss = sum(part(x) for part, x in zip(parts, inputs, strict=True))
            backward(parallel, 0, loss, reduce=True)
            parallel.finish()
            return (
                context.tp.rank,
                gradients(optimizer),
                optimizer.grad_norm(),
                optimizer.measures.count_zero_grads(),
            )

        return work

    for tp_rank, found, norm, zeros in ThreadWorld(4, 20.0).run(rank(ThreadWorld(4, 20.0))):
        assert found == {"partial": [6.0] * 3, "replicated": [10.0] * 3, "sliced": [2.0 * tp_rank] * 3}
        assert norm**2 == pytest.approx(3 * (36 + 100 + 4))
        assert zeros == 3  # the first slice's


@EVERY_STORE
@EVERY_STAGE
@over_table("stages", [1, 2, 3])
def test_tied_copies_on_the_ends_of_a_pipeline(stage, stages, kind):
    """Gradients are summed over both, the copies stay equal, and the norm counts one of them."""
    world = ThreadWorld(2 * stages, 20.0)

    def work(r):
        context = thread_context(world, ProcessGrid(pp=stages, dp=2), r)
        place = context.pp.rank
        if place == 0:
            layer = Times(parameter("word", [1.0, 2.0, 3.0], shared=stages > 1))
        elif place == stages - 1:
            layer = Times(parameter("head", [1.0, 2.0, 3.0], shared=True, tied_with="word"))
        else:
            layer = Times(parameter("middle", [1.0]))
        parallel, optimizer = build([layer], policy(stage), context, kind=kind)
        parallel.start()
        backward(parallel, 0, layer(torch.tensor(10.0**place)), reduce=True)
        parallel.finish()
        norm = optimizer.grad_norm()
        optimizer.step(1e-2, 0.0)
        weights = {spec.name: state["weight"].tolist() for spec, state in optimizer.full_state()}
        return gradients(optimizer), norm, weights

    records = world.run(work)
    total = 2 * (1.0 + 10.0 ** (stages - 1)) if stages > 1 else 2.0
    middle = 20.0 if stages == 3 else 0.0
    for _, norm, _ in records:
        assert norm**2 == pytest.approx(3 * total**2 + middle**2)
    first, last = records[0], records[-1]
    assert first[0] == {"word": [total] * 3}
    assert list(first[2].values()) == list(last[2].values())


def test_reductions_start_in_bucket_order_while_backward_runs():
    def work(context):
        calls = []
        layers = [Times(parameter(str(i), [1.0] * (i + 1))) for i in range(4)]
        parallel, _ = build(layers, policy(0, bucket_size=1), with_spies(context, calls))
        parallel.start()
        parallel.begin_backward(0, reduce=True)
        seen = []
        for i in (2, 3, 0, 1):  # the last bucket first would be 3, 2, 1, 0
            layers[i](torch.tensor(1.0)).backward()
            seen.append([size for _, _, size in calls])
        parallel.end_backward()
        return seen

    assert in_threads(2, work)[0] == [[], [4, 4], [4, 4], [4, 4, 2, 2]]


def test_transient_buffers_are_few_and_used_again():
    """Stage 2 holds one buffer that fills and at most one under way, of the largest bucket's size."""

    def work(context):
        layers = [Times(parameter(str(i), [1.0] * 8)) for i in range(12)]
        units = [unit for layer in layers for unit in module_units(layer)]
        settings = policy(2, bucket_size=16)
        store = build_store(units, settings, context)
        taken = set()
        reducer = GradientReducer(store, settings, context)
        take = reducer._buffers.take
        reducer._buffers.take = lambda bucket: taken.add((b := take(bucket)).data_ptr()) or b
        for bucket in store.buckets:
            for param in bucket.params:
                param.register_post_accumulate_grad_hook(reducer.collect)
        for _ in range(3):
            reducer.start()
            for _ in range(2):
                reducer.begin(0, reduce=True)
                sum(layer(torch.tensor(1.0)) for layer in layers).backward()
                reducer.end()
            reducer.finish()
        return len(store.buckets), len(taken)

    count, taken = in_threads(2, work)[0]
    assert count == 6
    assert taken <= 2


def test_a_gradient_outside_a_backward_is_refused():
    layer = Times(parameter("w", [1.0]))
    parallel, _ = build([layer], policy(0), solo_context())
    parallel.start()
    with pytest.raises(AssertionError, match="w: a gradient outside a backward"):
        layer(torch.tensor(1.0)).backward()


def test_experts_are_reduced_over_their_own_replicas():
    """Two slices x two expert ranks x two replicas: dense gradients sum over four ranks, experts' over 2."""
    world, grid = ThreadWorld(8, 20.0), ProcessGrid(dp=4, ep=2, tp=2)
    over_ep, over_both = (Cut(0, "ep"),), (Cut(0, "ep"), Cut(1, "etp"))

    def work(r, stage):
        context = thread_context(world, grid, r)
        parts = [
            Times(parameter("dense", [1.0])),
            Times(parameter("bias", [1.0] * 3, cuts=over_ep)),
            Times(parameter("weight", [[1.0] * 5], cuts=over_both)),
        ]
        parallel, optimizer = build(parts, policy(stage), context)
        parallel.start()
        # 1 to 4 on the ranks that read different samples; the slices of a weight have gradients of their own.
        x = torch.tensor(context.data.rank + 1.0)
        loss = parts[0](x) + parts[1](x) + parts[2](x * (1 + context.tp.rank))
        backward(parallel, 0, loss, reduce=True)
        parallel.finish()
        return context.place, gradients(optimizer), optimizer.grad_norm()

    for stage in range(len(STAGES)):
        for place, found, norm in world.run(lambda r, stage=stage: work(r, stage)):
            # Samples 1 and 3 come to the first expert, 2 and 4 to the second.
            total = 4.0 + 2.0 * place.index("ep")
            assert found == {
                "dense": [10.0],
                "bias": [total] * 3,
                "weight": [[total * (1 + place.index("etp"))] * 5],
            }
            assert norm**2 == pytest.approx(100 + 3 * (16 + 36) + 5 * (16 + 36) * (1 + 4))


def test_two_uses_in_one_graph_are_collected_once():
    param = parameter("w", [1.0, 1.0])
    units = [Unit(0, nn.Module(), (param,))]
    settings = policy(1)
    store = build_store(units, settings, solo_context())
    parallel = DataParallel(units, store, settings, solo_context())
    optimizer = Optimizer(store, Adam(), solo_context(), 0.0)
    parallel.start()
    backward(parallel, 0, (param * 2.0 + param * 3.0).sum(), reduce=True)
    parallel.finish()
    assert gradients(optimizer) == {"w": [5.0, 5.0]}
