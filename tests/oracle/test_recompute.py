"""Recompute runs again what it is meant to: the numbers would be right without."""

from __future__ import annotations

from collections import Counter

import pytest

from megazero.layers import activation as activation_module
from megazero.layers import attention_cores as attention_module
from tests.oracle import product
from tests.oracle.cases import FACTORS, flags_of
from tests.oracle.text import DATASETS


@pytest.mark.parametrize(
    ("recompute", "attention", "activation"),
    [
        ({}, 2, 2),
        ({"recompute-granularity": "selective"}, 4, 2),
        ({"recompute-granularity": "full"}, 4, 4),
        ({"recompute-granularity": "full", "recompute-method": "block"}, 3, 3),
        ({"recompute-granularity": "full", "recompute-method": "every", "recompute-num-layers": 2}, 3, 3),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else None,
)
def test_how_often_each_half_of_a_layer_runs_in_a_step(
    recompute, attention, activation, tmp_path, monkeypatch
):
    """Two layers, one micro-batch: each runs once, and once more if backward is to compute it again."""
    runs = Counter()

    def counting(module, name):
        original = getattr(module, name)

        def run(*args, **kwargs):
            runs[name] += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(module, name, run)

    counting(attention_module, "attend")
    counting(activation_module, "bias_gelu")
    flags = flags_of(FACTORS, {"batch": "whole", "layers": "2", "optimizer": "sgd"})
    product.write_datasets(tmp_path, {"small": DATASETS["small"]})
    product.train({**flags, "train-iters": 1, **recompute}, tmp_path, tmp_path, ranks=1)
    assert runs == {"attend": attention, "bias_gelu": activation}
