"""The split backward of linear layers: input half and weight half together are the whole one, bit for bit."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from megazero.config.tree.model import ModelConfig
from megazero.config.tree.recompute import RecomputeConfig
from megazero.layers.collectives import own_rows
from megazero.layers.initialize import initialize
from megazero.layers.inputs import LayerInputs
from megazero.layers.linear import ColumnParallelLinear, RowParallelLinear, column_linear
from megazero.layers.placement import Placement
from megazero.layers.recompute import recompute_units, run_layers
from megazero.layers.rows import Rows
from megazero.mpu.context import solo_context, thread_context
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.param_spec import Cut, InitialValues, ParamSpec
from megazero.mpu.still_group import StillGroup
from megazero.mpu.thread_group import ThreadWorld
from megazero.mpu.wrapping_group import WrappingGroup
from tests.layers.live_bytes import LiveBytes
from tests.layers.samples import causal_layer
from tests.tables import over_table

S, B, H, V = 8, 2, 16, 12
CONFIG = ModelConfig(num_layers=2, hidden_size=H, num_attention_heads=4, seq_length=S, activation="swiglu")


@dataclass(frozen=True)
class Case:
    """One way to run the same layers."""

    tp: int = 1
    sequence_parallel: bool = False
    recompute: str = "none"
    dtype: torch.dtype = torch.float32


def tensor(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def on_ranks(tp: int, work) -> list:
    """``work(context)`` on each of `tp` ranks."""
    if tp == 1:
        return [work(solo_context())]
    world, grid = ThreadWorld(tp), ProcessGrid(tp=tp)
    return world.run(lambda rank: work(thread_context(world, grid, rank)))


def step(context, case: Case, split: bool) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Gradients of a pass that uses the first layer twice, and the weights that came back from halves."""
    placement = Placement.of(context, case.dtype, sequence_parallel=case.sequence_parallel)
    recompute = RecomputeConfig(granularity=case.recompute)
    model = nn.Module()
    model.layers = nn.ModuleList(
        causal_layer(i, CONFIG, placement, selective=case.recompute == "selective") for i in range(2)
    )
    spec = ParamSpec("head.weight", (V, H), InitialValues("normal", 0.02), (Cut(0, "tp"),))
    model.head = placement.parameter(spec)
    initialize(model, 7, placement.place)
    layers = [model.layers[i] for i in (0, 1, 0)]
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    x = tensor(1, S, B, H, dtype=case.dtype)
    x = (own_rows(x, placement.tp) if placement.sequence_parallel else x).requires_grad_()
    deferred = [] if split else None
    units = recompute_units(3, recompute)
    inputs = LayerInputs(Rows(range(S), spread=placement.spread), deferred=deferred)
    hidden, _ = run_layers(layers, x, inputs, units)
    logits = column_linear(
        hidden, model.head, None, placement.tp, placement.sequence_parallel, deferred=deferred
    )
    logits.backward(tensor(2 + placement.tp.rank, *logits.shape, dtype=case.dtype))
    returned = [names[id(half())] for half in deferred or ()]
    return {"x": x.grad} | {name: p.grad for name, p in model.named_parameters()}, returned


LAYOUTS = ((1, False), (2, False), (2, True), (4, False), (4, True))
CASES = [Case(*layout, r) for layout, r in itertools.product(LAYOUTS, ("none", "selective", "full"))]
CASES += [Case(*layout, dtype=torch.bfloat16) for layout in LAYOUTS]


@over_table("case", CASES, ids=str)
def test_two_halves_are_the_whole(case):
    """Each linear weight once per use, in the order of backward; everything else in the input half."""
    whole = on_ranks(case.tp, lambda context: step(context, case, split=False))
    halves = on_ranks(case.tp, lambda context: step(context, case, split=True))
    weights = ("mlp.down", "mlp.up", "attention.out", "attention.qkv")
    order = ["head", *(f"layers.{i}.{weight}.weight" for i in (0, 1, 0) for weight in weights)]
    for (expected, _), (grads, returned) in zip(whole, halves, strict=True):
        assert returned == order
        assert len(grads) == 1 + 2 * 12 + 1
        assert all(torch.equal(grads[name], expected[name]) for name in expected)
        assert all(grad.abs().max() > 0 for grad in grads.values())


def test_the_input_half_leaves_the_weight_alone():
    """A parameter's hooks hear nothing of a weight whose gradient comes later; a bias is done at once."""
    layer = ColumnParallelLinear("l", H, (2, 3), Placement.of(solo_context(), torch.float32))
    initialize(layer, 1, layer.placement.place)
    heard = []
    for name, parameter in layer.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: heard.append(name))
    deferred = []
    layer(tensor(1, S, B, H).requires_grad_(), deferred).sum().backward()
    assert heard == ["bias"]
    assert layer.weight.grad is None
    assert deferred[0]() is layer.weight
    assert layer.weight.grad.shape == (2, 3, H)
    with pytest.raises(AssertionError, match="computed already"):
        deferred[0]()


def test_an_input_without_gradient_has_no_halves():
    """Autograd would never reach the layer, and its weight would go without a gradient."""
    layer = ColumnParallelLinear("l", H, (V,), Placement.of(solo_context(), torch.float32), bias=False)
    initialize(layer, 1, layer.placement.place)
    x, deferred = tensor(1, S, B, H), []
    layer(x, deferred).sum().backward()
    assert deferred == []
    assert torch.allclose(layer.weight.grad, x.sum((0, 1)).expand(V, H), atol=1e-5)


@over_table(
    ("kind", "sequence_parallel", "elements"),
    [
        # The input whole or this rank's part of it, and the slice of the output's gradient.
        ("column", False, S * B * H + S * B * V // 2),
        ("column", True, S // 2 * B * H + S * B * V // 2),
        # The slice of the input, and the output's gradient, which the input half has gathered.
        ("row", False, S * B * H // 2 + S * B * V),
        ("row", True, S * B * H // 2 + S * B * V),
    ],
)
def test_what_waits_for_the_weight_half_and_that_nothing_stays(kind, sequence_parallel, elements):
    def work(context):
        placement = Placement.of(context, torch.float32, sequence_parallel=sequence_parallel)
        deferred = []
        if kind == "column":
            layer = ColumnParallelLinear("l", H, (V,), placement)
            forward = lambda x: layer(x, deferred)  # noqa: E731
            x = tensor(1, S // 2 if sequence_parallel else S, B, H)
        else:
            layer = RowParallelLinear("l", H, V, placement)
            forward = lambda x: layer(x, deferred)[0]  # noqa: E731
            x = tensor(1, S, B, H // 2)
        initialize(layer, 1, context.place)
        with LiveBytes() as live:
            x = x.clone().requires_grad_()
            out = forward(x + 0.0)
            (out * out).sum().backward()
            del out, x
            layer.bias.grad = None
            context.tp.barrier()  # a group of threads holds what it moved last
            waiting = live.total
            deferred[0]()
            context.tp.barrier()
        return waiting, live.total

    for waiting, after in on_ranks(2, work):
        assert waiting == 4 * elements
        assert after == 4 * H * V // 2  # the gradient


class _Events(TorchDispatchMode):
    """Writes down products, and the starts and ends of collectives, in the order of launches."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.mm.default:
            self.events.append("product")
        return func(*args, **(kwargs or {}))


class _LoggedGroup(WrappingGroup):
    def __init__(self, inner, events: list[str]):
        super().__init__(inner)
        self.events = events

    def _collective(self, call):
        self.events.append(f"start {call.operation}")
        call.start(self.inner)
        return _End(call.operation, self.events)


@dataclass(frozen=True)
class _End:
    operation: str
    events: list[str]

    def wait(self) -> None:
        self.events.append(f"wait {self.operation}")


@pytest.mark.parametrize(
    ("sequence_parallel", "expected"),
    [
        (False, ["product", "start all_reduce", "product", "wait all_reduce"]),
        (
            True,
            [
                *("start all_gather", "product", "start reduce_scatter", "wait all_gather"),
                *("product", "wait reduce_scatter"),
            ],
        ),
    ],
)
def test_the_input_s_gradient_travels_beside_the_product_for_the_weight_s(sequence_parallel, expected):
    """It is launched first, so that a device which keeps to the order of launches overlaps the two."""
    with _Events() as log:
        group = _LoggedGroup(StillGroup("tp", 0, (0, 1)), log.events)
        weight = nn.Parameter(torch.ones(6, H))
        x = torch.ones(S, B, H, requires_grad=True)
        y = column_linear(x, weight, None, group, sequence_parallel)
        log.events.clear()
        y.sum().backward()
    assert log.events == expected
