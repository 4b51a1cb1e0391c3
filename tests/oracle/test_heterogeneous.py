"""The product trains layers of their own sizes as the oracle does."""

from __future__ import annotations

import json
from functools import partial

import pytest

from tests.oracle import product
from tests.oracle.agreement import check_spread, check_steps, check_tensors
from tests.oracle.cases import FACTORS, STEPS, flags_of
from tests.oracle.heterogeneous import HeterogeneousModel
from tests.oracle.text import DATASETS
from tests.oracle.trainer import train

NEMOTRON = {"sparsify": None, "no_op": False, "replace_with_linear": False}
ALL = [
    {"attention": {"n_heads_in_group": 2, **NEMOTRON}, "ffn": {"ffn_mult": 2.625, **NEMOTRON}},
    {"attention": {"n_heads_in_group": None, **NEMOTRON, "no_op": True}, "mlp": {"ffn_hidden_size": 24}},
    {"attention": {"num_query_groups": 4}, "ffn": {"ffn_mult": None, "no_op": True}},
    {"attention": {}, "ffn": {}},
]
TWO = [
    {"attention": {"num_key_value_heads": 2}, "ffn": {"intermediate_size": 40}},
    {"attention": {"no_op": True}, "ffn": {"no_op": True}},
    {"attention": {"n_heads_in_group": 1}, "ffn": {"intermediate_size": 56}},
]

# (settings of the other parts, the layers, layout, ranks)
CASES = {
    "all kinds": (
        {"positions": "rope", "bias": "no-bias", "normalization": "rms", "activation": "swiglu"},
        ALL,
        {"tensor-model-parallel-size": 2, "sequence-parallel": True},
        2,
    ),
    "an empty layer": (
        {"reset-attention": "yes", "hidden-dropout": "0.2", "positions": "learned", "batch": "accumulated"},
        TWO,
        {"pipeline-model-parallel-size": 2, "pipeline-partition": "cost"},
        2,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_product_trains_uneven_layers_as_the_oracle(name, data, tmp_path):
    others, layers, layout, ranks = CASES[name]
    flags = flags_of(FACTORS, {"batch": "whole", "optimizer": "adam", "clip": "sometimes", **others})
    text = json.dumps({"block_configs": layers})
    flags |= {"num-layers": len(layers), "heterogeneous-layers-config-encoded-json": text} | layout
    initial = product.initial_weights(flags, data)
    check_spread(flags, initial)
    source = [DATASETS[each] for each in flags["data-path"]]
    wanted = train(flags, source, initial, partial(product.kept, flags["seed"]), STEPS, HeterogeneousModel)
    records, tensors = product.train(flags, data, tmp_path, ranks)
    check_steps(records, wanted.steps, 1e-6)
    check_tensors(tensors, wanted)
    assert not [n for n, weight in wanted.weights.items() if weight.equal(initial[n].double())]
