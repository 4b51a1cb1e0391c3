"""Law 1 where layers see some tokens, or are left out; the sweeps over layouts have many more of these."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest
import torch

from megazero.config.tree.config import Config
from megazero.config.tree.curriculum import CurriculumConfig
from megazero.config.tree.skipping import SkippingConfig
from megazero.verify.compare import compare
from megazero.verify.record import Record
from megazero.verify.run import run_alone, run_in_threads, run_in_world
from tests.equivalence.one_process import assert_holds_all
from tests.equivalence.swept import swept
from tests.layouts.layout import METHODS, SEQUENCE, Layout

# 4, 4, 8, 8, 12 of 16 tokens in the five steps.
DROPPING = {
    "random_ltd": True,
    "random_ltd_min_value": 4,
    "random_ltd_require_steps": 6,
    "random_ltd_seq_per_step": 4,
}
# 8, 12, 12, 16, 16 tokens, of which some layers see 4, 4, 8, 8, 12.
GROWING = CurriculumConfig(
    seqlen_schedule="fixed_linear",
    seqlen_min_difficulty=8,
    seqlen_total_curriculum_step=4,
    seqlen_difficulty_step=4,
)
SETTINGS = {
    "inner": {"skipping": SkippingConfig(**DROPPING)},
    "all": {"skipping": SkippingConfig(**DROPPING, random_ltd_layer_id=(0, 1, 2, 3))},
    "growing": {"skipping": SkippingConfig(**DROPPING), "curriculum": GROWING},
    "layers": {
        "skipping": SkippingConfig(**DROPPING, progressive_layer_drop=True, pld_theta=0.2, pld_gamma=1.0)
    },
}


def with_settings(layout: Layout, name: str) -> Config:
    return layout.config().model_copy(update=SETTINGS[name])


@cache
def serial(layout: Layout, name: str) -> Record:
    return run_alone(with_settings(layout, name))


def check(records: list[Record], layout: Layout, name: str) -> None:
    bad = [str(d) for d in compare(records, serial(layout.serial, name)) if d.share > 1]
    assert not bad, "\n".join(bad)


LAYOUTS = [
    (Layout(layers=4, cp=2, shape="llama", micro_batch=2, dropout=0.1), "inner"),
    (Layout(layers=4, tp=2, sequence_parallel=True, dropout=0.1, micro_batch=2), "all"),
    (Layout(layers=4, tp=4, sequence_parallel=True, shape="llama", recompute="full"), "growing"),
    (Layout(layers=4, tp=2, dp=2, zero=3, shape="llama", recompute="selective"), "layers"),
    (Layout(layers=4, pp=2, schedule="interleaved", virtual=2, micro_batch=2, dropout=0.1), "inner"),
    (Layout(layers=4, pp=4, shape="llama", dropout=0.1), "all"),
    (Layout(layers=4, pp=2, schedule="zb-v", tp=2, sequence_parallel=True), "layers"),
    (Layout(layers=4, pp=4, schedule="zb-h1"), "layers"),
    (Layout(layers=4, dp=2, ep=2, experts="top2", zero=2), "growing"),
    (Layout(layers=4, tp=2, dp=2, ep=2, experts="biased", sequence_parallel=True), "layers"),
    pytest.param(
        Layout(layers=4, tp=2, shape="bert", dropout=0.1, micro_batch=2), "all", marks=pytest.mark.fast
    ),
    (Layout(layers=4, pp=2, dp=2, shape="bert-original", optimizer="lamb", zero=1), "growing"),
    (Layout(layers=4, dp=4, zero=3, shape="bert", recompute="full", keep=True), "layers"),
]


@pytest.mark.parametrize(("layout", "name"), LAYOUTS, ids=lambda x: x.name if isinstance(x, Layout) else x)
def test_layout_equals_one_process(layout, name):
    check(run_in_threads(with_settings(layout, name), layout.grid), layout, name)


@pytest.mark.slow
@pytest.mark.gloo
def test_processes_equal_one_process(pool):
    layout = Layout(layers=4, tp=2, pp=2, sequence_parallel=True, micro_batch=2, dropout=0.1)
    records = pool.run(run_in_world, layout.world_size, with_settings(layout, "growing"), layout.grid)
    check(records, layout, "growing")


@pytest.mark.parametrize(("many", "total", "least"), [(False, 75, 14), (True, 100, 20)])
def test_the_sweeps_hold_every_method_with_every_setting(many, total, least):
    cheaper = [layout for layout in swept(many) if layout.method]
    assert len(cheaper) >= total
    assert min(Counter(layout.method for layout in cheaper).values()) >= least
    for method in filter(None, METHODS):
        assert_holds_all([layout for layout in cheaper if layout.method == method])


def equal(one: Record, other: Record) -> bool:
    weights = zip(one.weights, other.weights, strict=True)
    same = all(a[name].equal(b[name]) for a, b in weights for name in a)
    return same and one.losses == other.losses


@pytest.mark.parametrize(
    ("shape", "settings"),
    [
        # An encoder's micro-batches would keep their padding, so that its products have another shape.
        ("llama", {"random_ltd": True, "random_ltd_min_value": SEQUENCE, "random_ltd_require_steps": 5}),
        ("llama", {"progressive_layer_drop": True, "pld_theta": 1.0}),
        ("bert", {"progressive_layer_drop": True, "pld_theta": 1.0}),
    ],
)
def test_what_drops_nothing_changes_no_bit(shape, settings):
    plain = Layout(shape=shape).config()
    found = run_alone(
        plain.model_copy(update={"skipping": SkippingConfig(**settings, random_ltd_layer_id=(1,))})
    )
    assert equal(found, run_alone(plain))


@pytest.mark.parametrize("name", list(SETTINGS))
def test_each_method_changes_the_training(name):
    found, plain = serial(Layout(layers=4).serial, name), run_alone(Layout(layers=4).serial.config())
    assert found.losses[-1] != plain.losses[-1]
    for name, first in found.weights[0].items():
        assert not torch.equal(first, found.weights[-1][name])
