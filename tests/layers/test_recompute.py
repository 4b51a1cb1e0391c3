"""What is computed again in backward, and how its inputs wait for that."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn

from megazero.config.tree.model import ModelConfig
from megazero.config.tree.recompute import RecomputeConfig
from megazero.layers.collectives import own_rows
from megazero.layers.initialize import initialize
from megazero.layers.inputs import LayerInputs
from megazero.layers.placement import Placement
from megazero.layers.recompute import InputKeeping, recompute_units, run_layers
from megazero.layers.rows import Rows
from megazero.mpu.context import solo_context, thread_context
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.rng import sample_keys
from megazero.mpu.thread_group import ThreadWorld
from tests.layers.live_bytes import LiveBytes
from tests.layers.samples import causal_layer
from tests.zero.models import gpt_loss, make_gpt

S, B, H, LAYERS = 8, 2, 16, 4
CONFIG = ModelConfig(
    num_layers=LAYERS,
    hidden_size=H,
    num_attention_heads=4,
    seq_length=S,
    attention_dropout=0.1,
    hidden_dropout=0.1,
)


def units(layers: int, **config) -> list[tuple[list[int], bool]]:
    return [(list(span), again) for span, again in recompute_units(layers, RecomputeConfig(**config))]


def test_units_drawn_by_hand():
    assert units(4) == [([0, 1, 2, 3], False)]
    assert units(4, granularity="selective") == [([0, 1, 2, 3], False)]
    assert units(5, granularity="full", num_layers=2) == [([0, 1], True), ([2, 3], True), ([4], True)]
    assert units(4, granularity="full", method="block", num_layers=2) == [
        ([0], True),
        ([1], True),
        ([2, 3], False),
    ]
    assert units(2, granularity="full", method="block", num_layers=0) == [([0, 1], False)]
    assert units(2, granularity="full", method="block", num_layers=5) == [([0], True), ([1], True)]
    assert units(5, granularity="full", method="every", num_layers=3) == [
        ([0], True),
        ([1, 2], False),
        ([3], True),
        ([4], False),
    ]
    assert units(3, granularity="full", method="every", num_layers=2) == [
        ([0], True),
        ([1], False),
        ([2], True),
    ]
    assert units(2, granularity="full", method="every") == [([0], True), ([1], True)]


def on_ranks(tp: int, work) -> list:
    """``work(context)`` on each of `tp` ranks."""
    if tp == 1:
        return [work(solo_context())]
    world, grid = ThreadWorld(tp), ProcessGrid(tp=tp)
    return world.run(lambda rank: work(thread_context(world, grid, rank)))


class Stack:
    """Some layers, an input for them, and how they are recomputed."""

    def __init__(self, context, recompute: RecomputeConfig, *, sequence_parallel: bool = False):
        placement = Placement.of(context, torch.float32, sequence_parallel=sequence_parallel)
        self.layers = nn.ModuleList(causal_layer(i, CONFIG, placement) for i in range(LAYERS))
        initialize(self.layers, 3, context.place)
        x = torch.randn(S, B, H, generator=torch.Generator().manual_seed(1)).to(context.device)
        self.x = (own_rows(x, context.tp).clone() if placement.sequence_parallel else x).requires_grad_()
        keys = torch.from_numpy(sample_keys(5, range(B)))
        self.inputs = LayerInputs(Rows(range(S), keys=keys, spread=placement.spread))
        self.units = recompute_units(LAYERS, recompute)
        self.keeping = InputKeeping.of(recompute, placement)

    def forward(self) -> torch.Tensor:
        return run_layers(self.layers, self.x, self.inputs, self.units, self.keeping)[0]

    def gradients(self) -> list[torch.Tensor]:
        (self.forward() ** 2).sum().backward()
        return [self.x.grad, *(p.grad for p in self.layers.parameters())]


def full(**changes) -> RecomputeConfig:
    return RecomputeConfig(granularity="full", **changes)


@pytest.mark.parametrize(
    ("tp", "sequence_parallel"), [(1, False), (2, False), (2, True), (4, False), (4, True)]
)
def test_every_variant_gives_the_same_bits(tp, sequence_parallel):
    def gradients(recompute):
        return on_ranks(
            tp, lambda context: Stack(context, recompute, sequence_parallel=sequence_parallel).gradients()
        )

    expected = gradients(RecomputeConfig())
    variants = [full(method=method, num_layers=3) for method in ("uniform", "block", "every")]
    variants += [full(), full(method="every", num_layers=2, offload=True)]
    if not sequence_parallel:
        variants += [full(partition_activations=True, offload=offload) for offload in (False, True)]
    for recompute in variants:
        for rank, grads in enumerate(gradients(recompute)):
            same = [torch.equal(a, b) for a, b in zip(grads, expected[rank], strict=True)]
            assert all(same), (recompute, rank)


def kept_bytes(context, recompute: RecomputeConfig) -> int:
    """What stays between forward and backward, the result included."""
    stack = Stack(context, recompute)
    with LiveBytes() as live:
        out = stack.forward()
        context.tp.barrier()  # a group of threads holds what it moved last
        kept = live.total
    assert out.requires_grad
    return kept


@pytest.mark.parametrize("tp", [2, 4])
def test_partitioned_inputs_take_their_share(tp):
    """Between forward and backward stay the layers' inputs and the result."""
    whole = 4 * S * B * H
    assert on_ranks(tp, lambda context: kept_bytes(context, full())) == [LAYERS * whole] * tp
    partitioned = full(partition_activations=True)
    expected = LAYERS * whole // tp + whole
    assert on_ranks(tp, lambda context: kept_bytes(context, partitioned)) == [expected] * tp
    everything = on_ranks(tp, lambda context: kept_bytes(context, RecomputeConfig()))
    assert min(everything) > 2 * LAYERS * whole


@pytest.mark.parametrize("offload", [False, True])
def test_offload_lets_go_of_the_inputs(offload):
    stack = Stack(solo_context(), full(offload=offload))
    inputs = []
    for layer in stack.layers:
        layer.register_forward_pre_hook(lambda _, x: inputs.append(weakref.ref(x[0].untyped_storage())))
    out = stack.forward()
    alive = [ref() is not None for ref in inputs]
    assert alive == [True] + [not offload] * (LAYERS - 1)  # the first is the caller's
    out.sum().backward()
    assert len(inputs) == 2 * LAYERS  # each layer ran again


@pytest.mark.gpu
def test_offload_frees_device_memory_and_keeps_the_bits():
    def run(recompute: RecomputeConfig) -> tuple[int, list[torch.Tensor]]:
        """Device bytes that forward leaves behind, and the gradients."""
        stack = Stack(solo_context("cuda"), recompute)
        stack.gradients()  # what libraries allocate at first use
        stack.x.grad = None
        stack.layers.zero_grad(set_to_none=True)
        before = torch.cuda.memory_allocated()
        out = stack.forward()
        left = torch.cuda.memory_allocated() - before
        (out**2).sum().backward()
        return left, [stack.x.grad, *(p.grad for p in stack.layers.parameters())]

    (here, expected), (away, grads) = run(full()), run(full(offload=True))
    assert here - away == (LAYERS - 1) * 4 * S * B * H  # the first input is the caller's
    assert all(torch.equal(a, b) for a, b in zip(grads, expected, strict=True))


def test_nothing_is_kept_without_gradients():
    """No graph, so nothing to compute again: the layers run once, with no hooks."""
    stack = Stack(solo_context(), full(offload=True))
    with torch.no_grad():
        assert stack.forward().grad_fn is None


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recompute_leaves_every_way_to_differentiate(recompute):
    """Reentrant checkpoints would refuse `torch.autograd.grad`."""

    def gradients(model) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(gpt_loss(model, 0, 0), tuple(model.parameters()))

    torch.testing.assert_close(gradients(make_gpt(recompute)), gradients(make_gpt()))
