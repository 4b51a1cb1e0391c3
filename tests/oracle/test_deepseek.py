"""The product trains DeepSeek's shapes as the oracle does, which has formulas of its own."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from megazero.config.fields import FIELD_BY_PATH
from tests.oracle import product
from tests.oracle.agreement import check_spread, check_steps, check_tensors
from tests.oracle.cases import DEEPSEEK_FIELDS, FACTORS, STEPS, flags_of
from tests.oracle.deepseek import DeepseekModel
from tests.oracle.experts import train_experts
from tests.oracle.text import DATASETS

LATENT = {
    "multi-latent-attention": True,
    "kv-lora-rank": 12,
    "qk-head-dim": 6,
    "qk-pos-emb-head-dim": 4,
    "v-head-dim": 5,
}
YARN = {
    "rotary-scaling-factor": 4.0,
    "yarn-beta-fast": 2.0,
    "yarn-beta-slow": 0.1,
    "yarn-original-max-position-embeddings": 8,
    "mscale": 0.8,
    "mscale-all-dim": 0.6,
    "no-yarn-correction-range-round-to-int": True,
}

# (settings of the dense model, those of DeepSeek's shape, layout and seed, ranks)
CASES = {
    "v2-lite": (
        {"bias": "no-bias", "activation": "swiglu", "positions": "rope", "normalization": "rms"},
        {**LATENT, **YARN, "qk-layernorm": True},
        {"tensor-model-parallel-size": 2, "sequence-parallel": True},
        2,
    ),
    "plain rope, biases and a window": (
        {
            **{"bias": "bias", "activation": "gelu", "positions": "learned", "window": "all"},
            **{"attention-dropout": "0.15", "reset-attention": "yes"},
        },
        {**LATENT, "rope-type": "rope", "rotary-base": 50.0, "q-lora-rank": 9},
        {"recompute-granularity": "selective"},
        1,
    ),
    "further tokens of a dense model": (
        {
            **{"bias": "bias", "activation": "gelu", "positions": "rope", "head": "untied"},
            **{"hidden-dropout": "0.2", "reset-attention": "yes", "mask-ends": "yes", "batch": "accumulated"},
        },
        {"mtp-num-layers": 3, "mtp-loss-scaling-factor": 0.6},
        {"pipeline-model-parallel-size": 2},
        2,
    ),
    "v3": (
        {
            **{"bias": "no-bias", "activation": "swiglu", "positions": "rope", "normalization": "rms"},
            **{"head": "untied"},
        },
        {
            **{**LATENT, **YARN, "q-lora-rank": 14, "qk-layernorm": True},
            **{"mtp-num-layers": 1, "mtp-loss-scaling-factor": 0.3},
            **{"num-experts": (8,), "moe-layer-freq": (0, 1), "moe-router-topk": 4},
            **{"moe-router-score-function": "sigmoid", "moe-router-enable-expert-bias": True},
            **{"moe-router-bias-update-rate": 0.03, "moe-router-num-groups": 4, "moe-router-group-topk": 2},
            **{"moe-router-topk-scaling-factor": 2.5, "moe-ffn-hidden-size": 24},
            **{"moe-shared-expert-intermediate-size": 24},
            **{"moe-router-load-balancing-type": ("seq_aux_loss",), "moe-aux-loss-coeff": (0.02,)},
        },
        {"pipeline-model-parallel-size": 2, "seed": 9},
        2,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_product_trains_deepseeks_shapes_as_the_oracle(name, data, tmp_path):
    dense, special, layout, ranks = CASES[name]
    flags = flags_of(FACTORS, {"batch": "whole", "optimizer": "adam", "clip": "sometimes", **dense})
    if special.get("multi-latent-attention"):  # which has no groups of heads
        del flags["num-query-groups"], flags["group-query-attention"]
        flags = {k: v for k, v in flags.items() if k not in ("rotary-percent", *YARN)}
    flags |= special | layout
    initial = product.initial_weights(flags, data)
    check_spread(flags, initial)
    source = [DATASETS[each] for each in flags["data-path"]]
    kept = partial(product.kept, flags["seed"])
    wanted, terms, model, margin = train_experts(flags, source, initial, kept, STEPS, DeepseekModel)
    assert margin > 5e-6, "a decision so close may fall otherwise in fp32; take another seed"
    records, tensors = product.train(flags, data, tmp_path, ranks)
    check_steps(records, wanted.steps, 1e-6)
    for record, step in zip(records, terms, strict=True):
        for term, mean in step.items():
            key = term if term == "router_entropy" else f"{term}_loss"
            assert record[key] == pytest.approx(mean, rel=1e-5), key
    assert [term for term in terms[0] if term.startswith("mtp")] == list(model.further)
    for layer, state in model.states.items():
        router = f"layers.{layer}.mlp.router"
        assert torch.allclose(tensors[f"{router}.bias"]["router"].double(), state.bias.double(), atol=1e-6)
    check_tensors(tensors, wanted)


def test_every_setting_of_deepseeks_shapes_is_stated():
    stated = {f"--{flag}" for _, special, _, _ in CASES.values() for flag in special}
    assert {FIELD_BY_PATH[f"model.{name}"].flag for name in DEEPSEEK_FIELDS} <= stated
