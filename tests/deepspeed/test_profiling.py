"""The FLOPs profiler that scripts use: products that torch's registry lacks, and an engine's figures."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

import megazero
from megazero.deepspeed.reports.profiling import FlopsProfiler
from megazero.mpu.context import solo_context
from tests.tables import over_table


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *inputs):
        return self.function(*inputs)


@over_table(
    ("function", "shapes", "macs"),
    [
        (functional.scaled_dot_product_attention, [(2, 4, 16, 8)] * 3, 2 * 4 * 16 * 16 * (8 + 8)),
        (functional.scaled_dot_product_attention, [(1, 2, 5, 8), (1, 2, 7, 8), (1, 2, 7, 4)], 2 * 5 * 7 * 12),
        (torch.matmul, [(8,), (8,)], 8),
        (torch.matmul, [(4, 8), (8,)], 32),
        (torch.matmul, [(2, 1, 4, 8), (3, 8, 5)], 2 * 3 * 4 * 8 * 5),
    ],
)
def test_products_on_a_cpu_are_counted(function, shapes, macs):
    profiler = FlopsProfiler(module := Function(function))
    for _ in range(2):
        profiler.start_profile()
        module(*map(torch.rand, shapes))
        profiler.stop_profile()
        assert (profiler.macs, profiler.flops) == (macs, 2 * macs)
        profiler.end_profile()


def test_an_engine_keeps_the_figures_of_the_step():
    config = {
        "train_batch_size": 1,
        "optimizer": {"type": "Adam", "params": {"lr": 0.1}},
        "flops_profiler": {"enabled": True, "profile_step": 1},
    }
    engine = megazero.initialize(model=nn.Linear(10, 10), config=config, mpu=solo_context())[0]
    for _ in range(3):
        engine.backward(engine(torch.ones(1, 10)).sum())
        engine.step()
    profiler = engine.flops_profiler
    assert (profiler.flops, profiler.macs, profiler.params) == (200, 100, 110)
