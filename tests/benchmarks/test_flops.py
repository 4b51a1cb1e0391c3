"""Counts of FLOPs against printed figures."""

from __future__ import annotations

import pytest

from benchmarks.published.flops import COUNTS, Rate, Shape, step_flops
from megazero.errors import ConfigError


def gpt(layers: int, hidden: int, heads: int, vocabulary: int = 51200) -> Shape:
    return Shape(layers, hidden, heads, heads, 4 * hidden, vocabulary)


def tflops(count: str, shape: Shape, sequence: int, batch: int, gpus: int, seconds: float) -> float:
    return step_flops(count, shape, [sequence] * batch) / gpus / seconds / 1e12


def test_one_step_has_five_counts():
    """1,008B on 3,072 A100 in Narayanan et al. 2021: 163 TFLOP/s printed, 122 of them the model's."""
    counted = {name: tflops(name, gpt(128, 25600, 160), 2048, 3072, 3072, 102.63) for name in COUNTS}
    assert {name: round(value) for name, value in counted.items()} == {
        "hardware-full": 163,
        "hardware-selective": 123,
        "model": 122,
        "model-causal": 121,
        "6-n": 121,
    }


def test_selective_recomputation_of_22b_is_42_4_by_count():
    """Korthikanti et al. 2022 print an HFU of 43.7 beside an MFU of 41.5."""
    shape = gpt(48, 6144, 64)
    shares = [tflops(name, shape, 2048, 4, 8, 1.10) / 3.12 for name in ("model", "hardware-selective")]
    assert [round(share, 1) for share in shares] == [41.7, 42.4]


def test_causal_attention_of_405b_differs_by_4_percent_and_by_40_at_131072():
    shape = Shape(126, 16384, 128, 8, 53248, 128256, gated=True)
    for sequence, more in ((8192, 0.04), (131072, 0.40)):
        full, causal = (step_flops(name, shape, [sequence]) for name in ("model", "model-causal"))
        assert full / causal - 1 == pytest.approx(more, abs=0.005)


def test_sequences_attend_to_themselves():
    shape = gpt(4, 64, 4)
    whole, halves = (step_flops("model", shape, lengths) for lengths in ([4096], [2048, 2048]))
    assert whole - halves == 6 * 2 * 4 * 64 * (4096**2 - 2 * 2048**2)
    assert step_flops("6-n", shape, [4096]) == step_flops("6-n", shape, [2048, 2048])


def test_rates_of_two_counts_are_not_compared():
    mfu, hfu = Rate("model", 122e12), Rate("hardware-full", 163e12)
    assert mfu.over(Rate("model", 61e12)) == 2
    with pytest.raises(ConfigError, match="of one count to be compared, but are model and hardware-full"):
        mfu.over(hfu)
    with pytest.raises(ConfigError, match="must be one of hardware-full"):
        step_flops("mfu", gpt(1, 8, 1), [1])
