"""Windows, linear biases and softmax offsets train the same model on every layout as in one process."""

from __future__ import annotations

from functools import cache

import pytest

from megazero.config.tree.config import Config
from megazero.verify.compare import compare
from megazero.verify.record import Record
from megazero.verify.run import run_alone, run_in_threads, run_in_world
from tests.layouts.layout import Layout

KINDS = {
    "window": {"window_size": (3, 0)},
    "first": {"window_size": (4, 0), "window_attn_skip_freq": (2,), "window_sink_tokens": 2},
    "alibi": {"position_embedding_type": "alibi"},
    "sink": {"softmax_type": "learnable"},
    "all": {
        **{"position_embedding_type": "alibi", "softmax_type": "learnable"},
        **{"window_size": (5, -1), "window_attn_skip_freq": (1, 0)},
    },
    "bloom": {"position_embedding_type": "alibi", "embed_layernorm": True},
    "one": {"softmax_type": "off-by-one", "window_size": (6, 0)},
    "xielu": {"activation": "xielu", "window_size": (6, 0)},
}
# Each has all keys of its row behind it, so these are other shapes than a decoder's.
ENCODERS = {
    "both sides": {"window_size": (3, 2), "softmax_type": "learnable"},
    "after": {"window_size": (-1, 1), "window_sink_tokens": 3},
}


def config_of(layout: Layout, kind: str) -> Config:
    config = layout.config()
    settings = {**KINDS, **ENCODERS}[kind]
    return config.model_copy(update={"model": config.model.model_copy(update=settings)})


@cache
def serial(layout: Layout, kind: str) -> Record:
    return run_alone(config_of(layout, kind))


def check(records: list[Record], layout: Layout, kind: str) -> None:
    bad = [str(d) for d in compare(records, serial(layout.serial, kind)) if d.share > 1]
    assert not bad, "\n".join(bad)


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("window", Layout(tp=2, sequence_parallel=True, dropout=0.2, shape="llama")),
        ("window", Layout(pp=2, dp=2, zero=3, schedule="zb-h1", shape="llama")),
        ("first", Layout(tp=2, pp=2, recompute="selective", shape="llama")),
        ("first", Layout(dp=2, zero=2, recompute="full", micro_batch=2)),
        pytest.param("alibi", Layout(tp=4, sequence_parallel=True, dropout=0.1), marks=pytest.mark.fast),
        ("alibi", Layout(tp=2, method="random-ltd", sequence_parallel=True, shape="llama")),
        ("sink", Layout(tp=2, sequence_parallel=True, recompute="full", untied=True)),
        ("xielu", Layout(tp=2, sequence_parallel=True, dropout=0.2)),
        ("xielu", Layout(tp=2, pp=2, dp=2, zero=3, schedule="zb-h1")),
        ("sink", Layout(pp=2, tp=2, schedule="zb-v", layers=4, recompute="selective")),
        pytest.param("all", Layout(tp=2, dp=2, zero=3), marks=pytest.mark.fast),
        ("all", Layout(tp=2, dp=2, zero=1, sequence_parallel=True, method="random-ltd", dropout=0.2)),
        ("all", Layout(dp=2, zero=2, method="both", recompute="full")),
        ("bloom", Layout(tp=2, pp=2, sequence_parallel=True, dropout=0.2)),
        ("bloom", Layout(dp=2, zero=3, untied=True, recompute="full")),
        ("one", Layout(tp=2, method="random-ltd", dropout=0.2)),
        ("both sides", Layout(tp=2, shape="bert", dropout=0.2)),
        ("both sides", Layout(tp=2, shape="bert", sequence_parallel=True, recompute="selective")),
        ("both sides", Layout(pp=2, shape="bert-original", dp=2, zero=1)),
        ("both sides", Layout(shape="bert", packed=True, tp=2, dropout=0.1)),
        ("after", Layout(shape="bert", packed=True, dp=2, zero=3)),
        ("after", Layout(shape="bert", tp=2, method="curriculum")),
    ],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_layout_equals_one_process(kind, layout):
    check(run_in_threads(config_of(layout, kind), layout.grid), layout, kind)


@pytest.mark.parametrize("kind", [*KINDS, *ENCODERS])
def test_each_does_something(kind):
    layout = Layout(shape="bert" if kind in ENCODERS else "gpt2").serial
    assert serial(layout, kind).losses[1] != run_alone(layout.config()).losses[1]


@pytest.mark.slow
@pytest.mark.gloo
def test_processes_equal_one_process(pool):
    layout, kind = Layout(tp=2, dp=2, zero=2, sequence_parallel=True), "all"
    check(pool.run(run_in_world, 4, config_of(layout, kind), layout.grid), layout, kind)
