"""The product trains hybrid models as the oracle does, which goes through their states row by row."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from tests.oracle import product
from tests.oracle.agreement import check_spread, check_steps, check_tensors
from tests.oracle.cases import FACTORS, STEPS, flags_of
from tests.oracle.hybrid import HybridModel
from tests.oracle.text import DATASETS
from tests.oracle.trainer import train

_SMALL = {"mamba-state-dim": 5, "mamba-head-dim": 4, "mamba-num-groups": 2}

# (settings of the other parts, the hybrid ones, layout, ranks)
CASES = {
    "all kinds": (
        {"positions": "none", "bias": "no-bias", "normalization": "rms", "activation": "squared_relu"},
        {"hybrid-layer-pattern": "M*-", **_SMALL},
        {"tensor-model-parallel-size": 2, "sequence-parallel": True},
        2,
    ),
    "documents": (
        {"reset-attention": "yes", "hidden-dropout": "0.2", "positions": "learned", "batch": "accumulated"},
        {"hybrid-layer-pattern": "MM", **_SMALL, "mamba-num-groups": 4, "mamba-num-heads": 12},
        {"pipeline-model-parallel-size": 2},
        2,
    ),
    "momentum": (
        {"positions": "rope", "optimizer": "momentum", "weight-decay": "linear", "epsilon": "large"},
        {"hybrid-layer-pattern": "M-", **_SMALL, "mamba-num-groups": 1, "mamba-state-dim": 9},
        {"recompute-granularity": "selective"},
        1,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_product_trains_hybrids_as_the_oracle(name, data, tmp_path):
    others, hybrid, layout, ranks = CASES[name]
    flags = flags_of(FACTORS, {"batch": "whole", "optimizer": "adam", "clip": "sometimes", **others})
    flags |= {"num-layers": len(hybrid["hybrid-layer-pattern"])} | hybrid | layout
    initial = product.initial_weights(flags, data)
    check_initial(flags, initial)
    source = [DATASETS[each] for each in flags["data-path"]]
    wanted = train(flags, source, initial, partial(product.kept, flags["seed"]), STEPS, HybridModel)
    records, tensors = product.train(flags, data, tmp_path, ranks)
    check_steps(records, wanted.steps, 1e-6)
    check_tensors(tensors, wanted)
    assert not [n for n, weight in wanted.weights.items() if weight.equal(initial[n].double())]


def check_initial(flags, initial):
    """What writes to the residual stream counts once for each layer; vectors have ranges of their own."""
    own = {name: w for name, w in initial.items() if "mamba." in name}
    into = {name: w for name, w in initial.items() if name.endswith(("out.weight", "down.weight"))}
    check_spread(flags, {name: w for name, w in initial.items() if name not in own | into})
    into |= {name: w for name, w in own.items() if name.endswith("output.weight")}
    for name, weight in into.items():
        spread = flags["init-method-std"] / math.sqrt(flags["num-layers"])
        assert weight.std().item() == pytest.approx(spread, rel=5 / math.sqrt(2 * weight.numel())), name
    for name, weight in own.items():
        if name.endswith("a_log"):
            assert weight.min() >= 0
            assert weight.max() <= math.log(16)
        elif name.endswith("dt_bias"):
            steps = weight.double().exp().log1p()
            assert steps.min() >= 1e-3 * 0.999
            assert steps.max() <= 0.1 * 1.001
        elif "conv" in name:
            assert weight.abs().max() <= 0.5
            assert weight.abs().max() > 0.4
        elif name.endswith(("skip", "norm.weight")):
            assert torch.equal(weight, torch.ones_like(weight))
