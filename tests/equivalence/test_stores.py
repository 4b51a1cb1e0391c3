"""Where state sleeps changes no bit: on the host or on disk, a layout trains as it does on the device."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
from torch import Tensor

from megazero.verify.record import Record
from megazero.verify.run import run_in_threads
from tests.equivalence.one_process import assert_holds_all
from tests.equivalence.swept import swept
from tests.layouts.layout import METHODS, STORES, Layout

SHARED = {"dp": 2, "micro_batch": 2}
FP16 = {"dtype": "fp16", "micro_batch": 2}
LAYOUTS = (
    pytest.param(Layout(store="cpu"), marks=pytest.mark.fast),
    Layout(zero=1, store="nvme", **SHARED),
    Layout(zero=2, store="nvme", shape="llama", **SHARED),
    Layout(zero=3, store="nvme", keep=True, **SHARED),
    Layout(zero=3, store="cpu", dtype="bf16", **SHARED),
    Layout(zero=3, store="apart", hpz=2, dp=4, micro_batch=2),
    Layout(zero=2, store="apart", tp=2, sequence_parallel=True, untied=True, **SHARED),
    Layout(zero=1, store="nvme", pp=2, schedule="zb-h1", **SHARED),
    Layout(zero=2, store="cpu", pp=2, schedule="interleaved", virtual=2, layers=4, **SHARED),
    Layout(zero=1, store="nvme", optimizer="lamb", shape="bert", **SHARED),
    Layout(zero=2, store="apart", experts="top2", ep=2, **SHARED),
    Layout(zero=3, store="nvme", experts="shared", ep=2, dp=4, micro_batch=2),
    Layout(zero=1, store="nvme", dp=2, **FP16),
    Layout(zero=3, store="nvme", dp=2, **FP16),
    Layout(store="cpu", tp=2, **FP16),
)


def run(layout: Layout) -> list[Record]:
    config = layout.config()
    if layout.dtype == "fp16":  # the first steps overflow, and are skipped
        scaled = config.precision.model_copy(update={"initial_loss_scale": 2.0**20, "hysteresis": 1})
        config = config.model_copy(update={"precision": scaled})
    return run_in_threads(config, layout.grid)


def same(found: Tensor, wanted: Tensor) -> bool:
    """Bit for bit, but that any NaN is as good as another."""
    return found.isnan().equal(wanted.isnan()) and found.nan_to_num(7.0).equal(wanted.nan_to_num(7.0))


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_no_bit_depends_on_the_store(layout):
    for found, wanted in zip(run(layout), run(replace(layout, store="")), strict=True):
        assert found.losses == wanted.losses
        assert repr(found.grad_norms) == repr(wanted.grad_norms)  # skipped steps have none
        if layout.dtype == "fp16":
            assert {math.isfinite(norm) for norm in found.grad_norms} == {False, True}
        for mine, other in ((found.weights, wanted.weights), (found.gradients, wanted.gradients)):
            for step, wanted_step in zip(mine, other, strict=True):
                assert step.keys() == wanted_step.keys()
                assert all(same(step[name], wanted_step[name]) for name in step)


@pytest.mark.parametrize(("many", "total", "least"), [(False, 80, 26), (True, 150, 50)])
def test_the_sweeps_hold_every_store_with_every_setting(many, total, least):
    offloaded = [layout for layout in swept(many) if layout.store]
    assert len(offloaded) >= total
    assert min(Counter(layout.store for layout in offloaded).values()) >= least
    for store in filter(None, STORES):
        these = [layout for layout in offloaded if layout.store == store]
        assert_holds_all(these)
        assert {layout.method for layout in these} == set(METHODS)
