"""Weights' gradients that are handed over as products: the sums are those of gradients made one by one."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from megazero.mpu.context import solo_context, thread_context
from megazero.mpu.thread_group import ThreadWorld
from megazero.ops.product_sum import Blas, Product
from megazero.train import build
from megazero.verify.record import record_training
from tests.layouts.layout import Layout
from tests.ops.test_product_sum import gemm_ex

LAYOUTS = [
    {},
    {"shape": "llama", "zero": 2, "recompute": "full"},
    {"shape": "bert", "zero": 3, "dropout": 0.1, "micro_batch": 2},
    {"schedule": "zb-h1", "pp": 2},
    {"tp": 2, "sequence_parallel": True, "dp": 2, "zero": 2},
]


def trained(layout: Layout):
    """The records of all ranks."""
    if layout.world_size == 1:
        return [record_training(layout.config(), solo_context(), 3)]
    world = ThreadWorld(layout.world_size)
    return world.run(
        lambda rank: record_training(layout.config(), thread_context(world, layout.grid, rank), 3)
    )


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_training_is_the_same_to_rounding(monkeypatch, layout, dtype):
    """Over micro-batches, stages of ZeRO, recompute, slices; halves of a backward are left alone."""
    alone, added = trained(Layout(dtype=dtype, **layout)), Counter()
    add_to = Product.add_to

    def counted(self, total, *, begins):
        added[begins] += add_to(self, total, begins=begins)
        return True

    monkeypatch.setattr(Product, "add_to", counted)
    monkeypatch.setattr(build, "working_blas", lambda device: Blas(gemm_ex, lambda: 77))
    summed = trained(Layout(dtype=dtype, **layout))
    assert bool(added[True]) == ("schedule" not in layout)
    near = {"fp32": 2e-6, "bf16": 4e-2}[dtype]
    for ours, theirs in zip(summed, alone, strict=True):
        assert ours.losses[0] == theirs.losses[0]
        assert ours.grad_norms == pytest.approx(theirs.grad_norms, rel=near)
        for name, gradient in ours.gradients[0].items():
            size = theirs.gradients[0][name].abs().max() + 1e-6
            assert (gradient - theirs.gradients[0][name]).abs().max() <= near * size, name


def test_it_is_left_out_where_layers_are_compiled(monkeypatch):
    """torch.compile looks into a layer, and a graph launches it: neither hands anything over."""
    monkeypatch.setattr(build, "working_blas", lambda device: pytest.fail("asked"))
    with torch.no_grad(), pytest.raises(pytest.fail.Exception):
        build_engine_of(Layout())
    build_engine_of(Layout(compiled="eager"))


def build_engine_of(layout: Layout):
    return record_training(layout.config(), solo_context(), 0)
