"""Law 1 for routing by the ids of tokens: each token has the same experts on every layout."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.equivalence.one_process import check_as_threads, serial
from tests.layouts.layout import Layout

HASHED = Layout(experts="hashed")
LAYOUTS = [
    replace(HASHED, tp=2, sequence_parallel=True, ep=2, etp=1, micro_batch=2, method="random-ltd"),
    replace(HASHED, layers=4, pp=2, zero=3, dp=2, ep=2, shape="llama"),
    replace(HASHED, cp=2, tp=2, micro_batch=2, documents=True),
    replace(HASHED, layers=4, pp=2, schedule="zb-v", recompute="full", dp=2, ep=2, dispatcher="allgather"),
    replace(HASHED, shape="bert", tp=2, micro_batch=2),
    replace(HASHED, shape="deepseek", pp=2, zero=1),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_layout_equals_one_process(layout):
    assert not layout.broken_rules()
    layout = layout.brief
    check_as_threads(layout)


def test_only_learned_choices_are_balanced():
    """A bias or a loss would move what nothing in the first layer depends on."""
    record = serial(HASHED.serial)
    assert record.losses[0]["seq_load_balancing loss"] > 0
    gradients = record.gradients[0]
    assert gradients["layers.0.mlp.router.weight"].abs().max() > 0
    assert gradients["layers.1.mlp.router.weight"].abs().max() > 0
