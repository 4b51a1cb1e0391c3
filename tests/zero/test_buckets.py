"""Buckets: weights live in them, come to be one by one, and take the memory that ZeRO's formulas say."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from megazero.errors import ConfigError
from megazero.layers.initialize import initialize_parameters
from megazero.layers.placement import Placement
from megazero.mpu.context import solo_context
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.param_spec import InitialValues, ParamSpec
from megazero.mpu.traffic import TrafficLog, recording_context
from megazero.optim.elementwise import Adam
from megazero.zero.build import aligned_multiple, build_store
from megazero.zero.optimizer import Optimizer
from megazero.zero.parallel import DataParallel
from megazero.zero.unit import Unit, module_units
from tests.tables import over_table
from tests.zero.policies import make_policy

F32, BF16 = torch.float32, torch.bfloat16


def stack(widths: list[int], dtype=F32, device="cpu") -> nn.ParameterList:
    """Parameters of these sizes, normally distributed once initialized."""
    specs = [ParamSpec(f"p{i}", (n,), InitialValues("normal", 1.0)) for i, n in enumerate(widths)]
    placement = Placement.of(solo_context(device), dtype)
    return nn.ParameterList([placement.parameter(spec) for spec in specs])


def one_rank(size: int, device: str = "cpu"):
    """Rank 0 of so many data-parallel ranks, the others left out."""
    return recording_context(ProcessGrid(dp=size), 0, TrafficLog(), device)


def fill(params) -> None:
    initialize_parameters(params, 5, solo_context().place)


def apart(params) -> list[Unit]:
    """Each parameter in a unit of its own."""
    return [Unit(0, nn.Module(), (p,)) for p in params]


def test_parameters_are_views_of_the_bucket():
    model = nn.Linear(2, 2)
    values = [p.detach().clone() for p in model.parameters()]
    (bucket,) = build_store(module_units(model), make_policy(), solo_context()).buckets
    assert bucket.full.tolist() == torch.cat([v.flatten() for v in values]).tolist()
    bucket.full.fill_(5.0)
    assert model.weight.tolist() == [[5.0, 5.0], [5.0, 5.0]]


def test_freed_parameters_are_loud():
    params = stack([6], device="meta")
    (bucket,) = build_store(apart(params), make_policy(3, persistence_threshold=0), one_rank(2), fill).buckets
    param = params[0]
    assert param.shape == (6,)
    assert torch.isnan(param).all()
    with pytest.raises(RuntimeError, match="single memory location"), torch.no_grad():
        param.add_(1.0)
    assert bucket.storage.nbytes() == 0
    before = bucket.store.shard(bucket).clone()
    bucket.unshard()
    bucket.wait()
    assert param.tolist() == before.tolist() * 2  # the group repeats this rank's shard
    bucket.reshard()
    assert torch.isnan(param).all()


def test_saved_views_are_alive_again_after_a_gather():
    params = stack([6], device="meta")
    (bucket,) = build_store(apart(params), make_policy(3, persistence_threshold=0), one_rank(2), fill).buckets
    bucket.unshard()
    bucket.wait()
    x = torch.ones(2, requires_grad=True)
    weight = params[0].view(3, 2).t()
    values = weight.detach().clone()
    y = x @ weight
    bucket.reshard()
    bucket.unshard()
    bucket.wait()
    y.sum().backward()
    assert x.grad.tolist() == values.sum(1).tolist()
    assert params[0].grad.tolist() == [1.0] * 6


def test_meta_parameters_get_the_values_of_their_names_and_stay_the_same_objects():
    real, later = stack([5, 70], device="cpu"), stack([5, 70], device="meta")
    fill(real)
    known = [id(p) for p in later]
    build_store(apart(later), make_policy(), one_rank(2), fill)
    assert [id(p) for p in later] == known
    for a, b in zip(real, later, strict=True):
        assert torch.equal(a, b)
        assert b.spec == a.spec
        assert b.requires_grad


def test_meta_parameters_need_values():
    with pytest.raises(ConfigError, match="`fill` must be given for the 1 parameters .* such as p0"):
        build_store(apart(stack([3], device="meta")), make_policy(), solo_context())


@pytest.fixture
def a_small_heap():
    """Leaves what there is out of the search for tensors, which takes seconds late in a long session.

    It stays out: to unfreeze would bring back what conftest.py has left out for all.
    """
    gc.collect()
    gc.freeze()


def alive() -> int:
    """Bytes of all real tensors that Python has made; sparse ones, of other tests, have no storage."""
    gc.collect()
    found = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor) and not x.is_meta]
    tensors = [x for x in found if x.layout is torch.strided]
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def test_a_sharded_model_is_never_whole_on_one_rank(a_small_heap):
    params = stack([1000] * 8, dtype=BF16, device="meta")
    start, seen = alive(), []

    def watch(unmade) -> None:
        seen.append(alive() - start)
        fill(unmade)

    build_store(apart(params), make_policy(3, persistence_threshold=0), one_rank(4), watch)
    rest = (2 + 4 + 4) * 1000 // 4  # shard, master, gradient sums: bytes that each earlier bucket left
    placeholders = 2
    assert seen == [i * (rest + placeholders) + 2000 + placeholders for i in range(8)]


def at_rest(store) -> dict[int, int]:
    """Bytes of each storage that lives from step to step, by address."""
    tensors = [t for b in store.buckets for t in (b.full, store.shard(b), store.sums(b))]
    tensors += [t for b in store.buckets for t in store.at_rest(b).values()]
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


@over_table(
    ("dtype", "accumulation", "main", "expected"),
    [
        # bytes of one parameter on each of N = 4 ranks, by stage
        (BF16, F32, F32, (2 + 4 + 12, 2 + 4 + 12 / 4, 2 + (4 + 12) / 4, (2 + 4 + 12) / 4)),
        (BF16, BF16, F32, (2 + 2 + 12, 2 + 2 + 12 / 4, 2 + (2 + 12) / 4, (2 + 2 + 12) / 4)),
        (F32, F32, F32, (4 + 4 + 8, 4 + 4 + 8 / 4, 4 + (4 + 8) / 4, (4 + 4 + 8) / 4)),
        (BF16, F32, BF16, (2 + 4 + 8, 2 + 4 + 8 / 4, 2 + (4 + 8) / 4, (2 + 4 + 8) / 4)),
    ],
)
@over_table("stage", range(4))
def test_memory_at_rest(stage, dtype, accumulation, main, expected):
    policy = make_policy(
        stage, persistence_threshold=0, max_live=0, accumulation_dtype=accumulation, main_dtype=main
    )
    params, context = stack([4000, 400, 40], dtype, "meta"), one_rank(4)
    units = apart(params)
    store = build_store(units, policy, context, fill)
    optimizer = Optimizer(store, Adam(), context, 0.0)
    parallel = DataParallel(units, store, policy, context)
    for _ in range(2):
        assert sum(at_rest(store).values()) == expected[stage] * 4440
        parallel.start()
        with parallel.gathered():
            pass
        parallel.finish()
        optimizer.step(1e-3, 0.0)


class Scale(nn.Module):
    """Multiplies by the mean of its weight; `looks` is called while the weight is in use."""

    def __init__(self, weight: nn.Parameter, look):
        super().__init__()
        self.weight, self.look = weight, look

    def forward(self, x):
        self.look()
        return x * self.weight.float().mean()


@over_table("stage", range(4))
def test_peak_during_a_step(stage):
    """Beyond what rests: a gathered bucket in stage 3; one that fills and one under way in stages 2 and 3."""
    size, count, ranks, accumulations = 1000, 8, 4, 2
    seen: list[int] = []
    params = stack([size] * count, BF16, "meta")
    policy = make_policy(stage, bucket_size=size, persistence_threshold=0, max_live=0, prefetch=0)
    context = one_rank(ranks)
    layers = [Scale(param, lambda: seen.append(now())) for param in params]
    units = [Unit(0, layer, (layer.weight,)) for layer in layers]
    store = build_store(units, policy, context, fill)
    optimizer = Optimizer(store, Adam(), context, 0.0)
    parallel = DataParallel(units, store, policy, context)
    reducer = parallel._reducer

    def now() -> int:
        fills = [p.fill for p in reducer._progress if p.fill is not None]
        moving = [t for fill in fills for t in (fill.buffer, fill.source)]
        moving += [t for flight in reducer._flights for t in (flight.reduction.result, flight.fill.source)]
        moving += reducer._buffers._free
        extra = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in moving}
        return sum({**extra, **at_rest(store)}.values())

    collect = reducer.collect
    reducer.collect = lambda param, product=None: (collect(param, product), seen.append(now()))
    rest = now()
    for _ in range(2):
        parallel.start()
        for i in range(accumulations):
            x = torch.ones((), requires_grad=True)
            for layer in layers:
                x = layer(x)
            parallel.begin_backward(0, reduce=stage >= 2 or i == accumulations - 1)
            x.backward()
            parallel.end_backward()
        parallel.finish()
        optimizer.step(1e-3, 0.0)
    gathered, transient = (2 if stage == 3 else 0), (2 * 4 if stage >= 2 else 0)
    assert len(seen) == 2 * accumulations * 2 * count
    assert rest < max(seen) <= rest + size * (gathered + transient) if stage >= 2 else max(seen) == rest


def test_everything_constructs_on_meta():
    params, context = stack([10**9, 10**9], BF16, "meta"), one_rank(64, "meta")
    policy = make_policy(3, max_live=0)
    units = apart(params)
    store = build_store(units, policy, context)
    optimizer = Optimizer(store, Adam(), context, 1.0)
    DataParallel(units, store, policy, context)
    assert [store.shard(b).numel() for b in store.buckets] == [10**9 // 64] * 2
    states = [optimizer.store.at_rest(bucket) for bucket in store.buckets]
    assert [set(state) for state in states] == [{"weight", "exp_avg", "exp_avg_sq"}] * 2
    assert all(t.is_meta for state in states for t in state.values())


def test_slices_are_aligned_on_a_gpu():
    devices = [torch.device(name) for name in ("cuda", "cpu", "meta")]
    assert [aligned_multiple(device) for device in devices] == [128, 1, 1]
