"""Law 1 with block-sparse attention, and that it trains what dense attention with the same mask trains."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

from megazero.config.rules.table import broken_rules
from megazero.config.tree.config import Config
from megazero.config.tree.curriculum import CurriculumConfig
from megazero.layers import attention_cores
from megazero.ops.attention import ALL, CAUSAL, attend
from megazero.verify.compare import compare
from megazero.verify.record import Record
from megazero.verify.run import run_alone, run_in_threads, run_in_world
from tests.layouts.layout import Layout

# Of 8 blocks of 2 tokens.
SETTINGS = {
    "fixed": {"sparse_attention": "fixed", "sparse_num_global_blocks": 2},
    "patterns": {
        "sparse_attention": "fixed",
        "sparse_different_layout_per_head": True,
        "sparse_num_different_global_patterns": 4,
    },
    "variable": {
        "sparse_attention": "variable",
        "sparse_local_window_blocks": (1, 2),
        "sparse_num_random_blocks": 1,
        "sparse_different_layout_per_head": True,
    },
    "bigbird": {
        "sparse_attention": "bigbird",
        "sparse_num_random_blocks": 1,
        "sparse_different_layout_per_head": True,
    },
    "bslongformer": {"sparse_attention": "bslongformer", "sparse_global_block_indices": (0, 5)},
    "local window": {"sparse_attention": "local_sliding_window"},
}
# 8, 12, 12, 16, 16 tokens in the five steps; the last block of 12 is whole.
GROWING = CurriculumConfig(
    seqlen_schedule="fixed_linear",
    seqlen_min_difficulty=6,
    seqlen_total_curriculum_step=4,
    seqlen_difficulty_step=3,
)


def with_settings(layout: Layout, name: str, **changes) -> Config:
    config = layout.config()
    model = config.model.model_copy(update={"sparse_block": 2, **SETTINGS[name]})
    config = config.model_copy(update={"model": model, **changes})
    assert broken_rules(config, layout.world_size) == []
    return config


@cache
def serial(layout: Layout, name: str) -> Record:
    return run_alone(with_settings(layout, name))


def check(records: list[Record], layout: Layout, name: str) -> None:
    bad = [str(d) for d in compare(records, serial(layout.serial, name)) if d.share > 1]
    assert not bad, "\n".join(bad)


LAYOUTS = [
    (Layout(layers=4, tp=2, sequence_parallel=True, dropout=0.1, micro_batch=2), "bigbird"),
    (Layout(layers=4, tp=4, shape="llama", recompute="full"), "variable"),
    (Layout(layers=4, tp=2, dp=2, zero=3, shape="llama", recompute="selective"), "patterns"),
    (Layout(layers=4, pp=2, schedule="interleaved", virtual=2, micro_batch=2, dropout=0.1), "fixed"),
    (Layout(layers=4, pp=2, schedule="zb-v", tp=2, sequence_parallel=True), "bslongformer"),
    (Layout(layers=4, dp=2, ep=2, experts="top2", zero=2), "local window"),
    pytest.param(
        Layout(layers=4, tp=2, shape="bert", dropout=0.1, micro_batch=2), "patterns", marks=pytest.mark.fast
    ),
    (Layout(layers=4, pp=2, dp=2, shape="bert-original", zero=1), "bigbird"),
    (Layout(layers=4, dp=2, tp=2, zero=3, shape="bert", recompute="full"), "variable"),
]


@pytest.mark.parametrize(("layout", "name"), LAYOUTS, ids=lambda x: x.name if isinstance(x, Layout) else x)
def test_layout_equals_one_process(layout, name):
    check(run_in_threads(with_settings(layout, name), layout.grid), layout, name)


@pytest.mark.slow
@pytest.mark.gloo
def test_processes_equal_one_process(pool):
    layout = Layout(layers=4, tp=2, pp=2, sequence_parallel=True, micro_batch=2, dropout=0.1)
    records = pool.run(run_in_world, layout.world_size, with_settings(layout, "bigbird"), layout.grid)
    check(records, layout, "bigbird")


@pytest.mark.parametrize("shape", ["gpt2", "bert"])
def test_a_curriculum_reads_the_beginning_of_the_layout(shape):
    layout = Layout(tp=2, shape=shape)
    records = run_in_threads(with_settings(layout, "patterns", curriculum=GROWING), layout.grid)
    alone = run_alone(with_settings(layout.serial, "patterns", curriculum=GROWING))
    assert not [str(d) for d in compare(records, alone) if d.share > 1]


MASKS = {
    ("fixed", "gpt2"): "10000000 11000000 11110000 11110000 00111000 00111100 00111111 00111111",
    ("fixed", "bert"): "11110011 11110011 11110011 11110011 00111111 00111111 00111111 00111111",
    ("bslongformer", "bert"): "11111111 11100100 11110100 10111100 10011100 11111111 10000111 10000111",
    ("local window", "gpt2"): "10000000 11000000 01100000 00110000 00011000 00001100 00000110 00000011",
    ("local window", "bert"): "11000000 11100000 01110000 00111000 00011100 00001110 00000111 00000011",
}


@pytest.mark.parametrize(("name", "shape"), MASKS)
def test_it_trains_what_dense_attention_with_the_same_mask_trains(name, shape, monkeypatch):
    """Losses and weights of five steps; the masks are written by hand."""
    layout = Layout(shape=shape)
    found = run_alone(with_settings(layout, name))
    rows = [[cell == "1" for cell in row] for row in MASKS[name, shape].split()]
    mask = torch.tensor(rows).repeat_interleave(2, 0).repeat_interleave(2, 1)

    def masked(q, k, v, call, offset=None):
        assert call.mask is None
        assert call.pattern in (ALL, CAUSAL)
        length = len(k)  # BERT's batches are as long as their longest sample
        return attend(q, k, v, replace(call, mask=mask[:length, :length]), offset)

    monkeypatch.setattr(attention_cores, "attend", masked)
    monkeypatch.setattr(attention_cores.LocalCore, "__call__", _every_row(attention_cores.LocalCore.__call__))
    dense = run_alone(layout.config())
    assert not [str(d) for d in compare([found], dense) if d.share > 1]
    monkeypatch.undo()
    assert [d for d in compare([found], run_alone(layout.config())) if d.share > 1]


def _every_row(core):
    """The core that computes all rows, of which BERT's last layer then takes those of masked words."""

    def every(self, q, k, v, inputs, *given):
        result = core(self, q, k, v, replace(inputs, wanted=None), *given)
        return inputs.narrow(result)

    return every
