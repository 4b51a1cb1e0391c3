"""Stage 3's gathers: what is there when, how far ahead, and what stays."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megazero.mpu.context import solo_context
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.traffic import TrafficLog, recording_context
from megazero.optim.elementwise import Adam
from megazero.zero.bucket import ShardedState
from megazero.zero.build import build_store
from megazero.zero.optimizer import Optimizer
from megazero.zero.parallel import DataParallel
from megazero.zero.unit import Unit, module_units
from tests.zero.harness import in_threads
from tests.zero.policies import make_policy

WIDTH = 4


class Stack(nn.Module):
    """Layers in a row that write down which of them are whole when each begins, in forward and backward."""

    def __init__(self, layers: int = 4):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))
        self.seen: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(self.note(x))
        return x

    def whole(self) -> str:
        return "".join(str(i) for i, m in enumerate(self.layers) if not torch.isnan(m.weight).any())

    def note(self, x: Tensor) -> Tensor:
        self.seen.append(self.whole())
        if x.requires_grad:
            x.register_hook(lambda grad: self.seen.append(self.whole()))
        return x


def build(model: nn.Module, context=None, **changes):
    context = context or recording_context(ProcessGrid(dp=2), 0, TrafficLog(), "cpu")
    settings = {"persistence_threshold": 0, "max_live": 0, "bucket_size": 10**9, **changes}
    policy = make_policy(3, **settings)
    units = module_units(model)
    store = build_store(units, policy, context)
    return DataParallel(units, store, policy, context), store.buckets


def presence(buckets) -> str:
    """The buckets' states from the first layer's on: . for a shard, ~ for arriving, # for whole."""
    marks = {ShardedState.SHARD: ".", ShardedState.ARRIVING: "~", ShardedState.WHOLE: "#"}
    return "".join(marks[b.presence] for b in reversed(buckets))


def pass_(parallel, model) -> list[str]:
    model.seen = []
    loss = model(torch.ones(1, WIDTH, requires_grad=True)).sum()
    parallel.begin_backward(0, reduce=True)
    loss.backward()
    parallel.end_backward()
    return model.seen


def test_each_layer_is_whole_only_while_it_is_used():
    model = Stack(3)
    parallel, _ = build(model, overlap_gather=False)
    parallel.start()
    # Nothing is between two forwards; in backward, each layer when the gradient of its output is there.
    assert pass_(parallel, model) == ["", "", "", "1", "0", "0"]
    assert model.whole() == ""


@pytest.mark.parametrize("reentrant", [True, False])
def test_recompute_gathers_what_backward_needs_and_leaves_nothing(reentrant):
    model = Stack(3)
    parallel, buckets = build(model, overlap_gather=False)
    parallel.start()
    x = torch.ones(1, WIDTH, requires_grad=True)
    loss = checkpoint(model, x, use_reentrant=reentrant).sum()
    assert model.seen == ["", "", ""]
    model.seen = []
    parallel.begin_backward(0, reduce=True)
    loss.backward()
    # The replay frees no layer, as backward follows; that frees each. A replay that autograd asks for begins
    # after the gradient has reached the last layer.
    assert model.seen[:3] == (["", "0", "01"] if reentrant else ["2", "02", "012"])
    assert presence(buckets) == "..."
    parallel.end_backward()
    parallel.finish()


def test_room_keeps_layers_for_their_next_use():
    model = Stack(3)
    parallel, _ = build(model, overlap_gather=False, max_live=2 * WIDTH * WIDTH)
    parallel.start()
    assert pass_(parallel, model) == ["", "0", "01", "01", "01", "01"]
    assert pass_(parallel, model)[0] == "01"
    parallel.finish()
    assert model.whole() == ""


def test_layers_are_gathered_ahead_from_the_second_pass_on():
    model = Stack(5)
    parallel, buckets = build(model, prefetch=2 * WIDTH * WIDTH)
    states: list[str] = []
    for layer in model.layers:
        # After the gatherer's own hook: what is under way while the layer computes.
        layer.register_forward_pre_hook(lambda module, args: states.append(presence(buckets)))
    parallel.start()
    pass_(parallel, model)
    assert states == ["#....", ".#...", "..#..", "...#.", "....#"]
    states.clear()
    parallel.gather(0)
    assert presence(buckets) == "~~..."
    pass_(parallel, model)
    assert states == ["#~~..", ".#~~.", "..#~~", "...#~", "....#"]
    parallel.gather(0, backward=True)
    assert presence(buckets) == "...~~"
    parallel.finish()
    assert presence(buckets) == "....."


def test_another_order_is_gathered_on_demand_and_learned():
    model = Stack(3)
    parallel, buckets = build(model, prefetch=WIDTH * WIDTH)
    states: list[str] = []
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda module, args: states.append(presence(buckets)))

    def run(order: list[int]) -> list[str]:
        states.clear()
        with torch.no_grad():
            for i in order:
                model.layers[i](torch.ones(WIDTH))
            parallel.release(0)
        return list(states)

    assert run([0, 1, 2]) == ["#..", ".#.", "..#"]
    assert run([0, 1, 2]) == ["#~.", ".#~", "..#"]
    assert run([0, 2, 1]) == ["#~.", ".~#", ".#~"]  # 1 was foreseen after 0, and 2 after 1
    assert run([0, 2, 1])[:2] == ["#.~", ".~#"]


@dataclass
class Pair:
    """What a module may return."""

    first: Tensor
    rest: list


class Odd(nn.Module):
    """Its outputs hide in a dataclass, and one of them is changed in place afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(16.0).view(4, 4) / 16)

    def forward(self, x: Tensor) -> Pair:
        y = x @ self.weight.view(4, 4)
        return Pair(y, [y * 2.0, {"no": None}])


def test_odd_outputs():
    def run(context):
        model = Odd()
        policy = make_policy(3, persistence_threshold=0, max_live=0)
        units = module_units(model)
        store = build_store(units, policy, context)
        parallel = DataParallel(units, store, policy, context)
        optimizer = Optimizer(store, Adam(), context, 0.0)
        parallel.start()
        x = torch.ones(2, 4, requires_grad=True)
        out = model(x)
        out.first.mul_(3.0)
        loss = (torch.tanh(out.first) + out.rest[0]).sum()
        parallel.begin_backward(0, reduce=True)
        loss.backward()
        parallel.end_backward()
        parallel.finish()
        return x.grad, next(grad for _, grad in optimizer.full_gradients())

    x_grad, weight_grad = run(solo_context())
    for found in in_threads(2, run):
        torch.testing.assert_close(found[0], x_grad)
        torch.testing.assert_close(found[1], 2 * weight_grad)


class Outer(nn.Module):
    """Uses its child's weight itself, after the child has run."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.child(x) @ self.child.weight


def test_a_weight_stays_while_an_outer_module_uses_it():
    model = Outer()
    weight = model.child.weight
    values = weight.detach().clone()
    context = recording_context(ProcessGrid(dp=2), 0, TrafficLog(), "cpu")
    policy = make_policy(3, persistence_threshold=0, max_live=0)
    inner = module_units(model)
    units = [Unit(0, model, (weight,)), *inner]
    store = build_store(units, policy, context)
    (bucket,) = store.buckets
    parallel = DataParallel(units, store, policy, context)
    half = values.flatten()[:8].repeat(2).view(4, 4)  # what the recording group gathers
    x = torch.ones(WIDTH)
    parallel.start()
    loss = model(x).sum()
    assert bucket.presence is ShardedState.SHARD
    assert loss.item() == pytest.approx((x @ half.t() @ half).sum().item(), rel=1e-5)


def test_gathered_reads_and_writes_back():
    def work(context):
        model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 5)).to(torch.bfloat16)
        with torch.no_grad():
            for i, param in enumerate(model.parameters()):
                param.fill_(i + 1.0)
        parallel, _ = build(model, context)
        optimizer = Optimizer(parallel.store, Adam(), context, 0.0)
        first, second = model[0].weight, model[1].bias
        with parallel.gathered([first]):
            assert first.tolist() == [[1.0] * 3] * 2
            assert torch.isnan(second).all()
        assert torch.isnan(first).all()
        with parallel.gathered(write_back=True):
            second.copy_(torch.arange(5.0))
        with parallel.gathered():
            assert second.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
            second.fill_(9.0)  # not written back
        masters = {spec.name: state["weight"] for spec, state in optimizer.full_state()}
        assert masters["1.bias"].dtype == torch.float32
        return masters["1.bias"].tolist(), masters["0.weight"].flatten().tolist()

    assert in_threads(3, work) == [([0.0, 1.0, 2.0, 3.0, 4.0], [1.0] * 6)] * 3


def test_an_interrupted_forward_leaves_nothing_whole():
    model = Stack(2)
    parallel, buckets = build(model)
    with pytest.raises(RuntimeError):
        model(torch.ones(1, WIDTH + 1))
    assert presence(buckets) == "#."
    parallel.start()
    assert presence(buckets) == ".."
    pass_(parallel, model)
    assert presence(buckets) == ".."


def test_publishing_renews_what_is_whole():
    # Weights that an evaluation left gathered must not outlive a load.
    def work(context):
        model = nn.Linear(3, 2, bias=False)
        parallel, _ = build(model, context, max_live=10**9)
        optimizer = Optimizer(parallel.store, Adam(), context, 0.0)
        with torch.no_grad():
            model(torch.ones(3))
        optimizer.load(lambda spec, kind: torch.full((2, 3), 4.0), ["weight"])
        optimizer.publish()
        with torch.no_grad():
            return model(torch.ones(3)).tolist()

    assert in_threads(2, work) == [[12.0, 12.0]] * 2
