"""The product trains experts as the oracle does, which routes by formulas of its own."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from megazero.config.derive import EXPERT_FIELDS
from megazero.config.fields import FIELDS
from tests.oracle import product
from tests.oracle.agreement import check_spread, check_steps, check_tensors
from tests.oracle.cases import FACTORS, STEPS, flags_of
from tests.oracle.experts import ExpertModel, expert_layers, train_experts
from tests.oracle.text import DATASETS

_EVEN = {"moe-router-load-balancing-type": ("seq_aux_loss",), "moe-aux-loss-coeff": (0.05,)}
_ONE = {"moe-router-topk": 1, "moe-router-pre-softmax": True}

# (settings of the dense model, experts, layout and seed, ranks)
CASES = {
    "top-2 dropless": (
        {"bias": "bias", "activation": "gelu"},
        {"num-experts": (4,), "moe-router-topk": 2, "moe-z-loss-coeff": 0.02, **_EVEN},
        {},
        1,
    ),
    "top-1 first come": (
        {"bias": "no-bias", "activation": "swiglu", "positions": "rope"},
        {
            "num-experts": (4,),
            "moe-expert-capacity-factor": 1.0,
            "moe-token-drop-policy": "position",
            "moe-capacity-scope": "sequence",
            **_ONE,
            **_EVEN,
        },
        {"zero-stage": 2, "expert-model-parallel-size": 2, "moe-token-dispatcher-type": "allgather"},
        2,
    ),
    "bias and groups": (
        {"bias": "bias", "activation": "swiglu", "optimizer": "momentum"},
        {
            "num-experts": (8,),
            "moe-router-topk": 2,
            "moe-router-score-function": "sigmoid",
            "moe-router-enable-expert-bias": True,
            "moe-router-bias-update-rate": 0.03,
            "moe-router-num-groups": 4,
            "moe-router-group-topk": 2,
            "moe-router-topk-scaling-factor": 1.5,
            "moe-router-load-balancing-type": ("none",),
            "moe-aux-loss-coeff": (0.0,),
        },
        {
            "tensor-model-parallel-size": 2,
            "sequence-parallel": True,
            "expert-model-parallel-size": 2,
            "expert-tensor-parallel-size": 1,
            "seed": 9,
        },
        2,
    ),
    "one by sigmoid": (
        {"bias": "no-bias", "activation": "gelu"},
        {
            "num-experts": (4,),
            "moe-router-topk": 1,
            "moe-router-score-function": "sigmoid",
            "moe-router-enable-expert-bias": True,
            "moe-router-bias-update-rate": 0.02,
            **_EVEN,
        },
        {"recompute-granularity": "full", "seed": 9},
        1,
    ),
    "shared with a gate": (
        {"bias": "bias", "activation": "squared_relu", "batch": "ramp"},
        {
            "num-experts": (4,),
            "moe-router-topk": 2,
            "moe-router-bias": True,
            "moe-ffn-hidden-size": 24,
            "moe-shared-expert-intermediate-size": 32,
            "moe-shared-expert-gate": True,
            "moe-router-load-balancing-type": ("global_aux_loss", "seq_aux_loss"),
            "moe-aux-loss-coeff": (0.05, 0.02),
            "moe-z-loss-coeff": 0.01,
        },
        {"tensor-model-parallel-size": 2},
        2,
    ),
    "residual": (
        {"bias": "bias", "activation": "gelu_exact", "batch": "accumulated"},
        {
            "num-experts": (4,),
            "mlp-type": "residual",
            "expert-interval": 2,
            "moe-router-load-balancing-type": ("aux_loss",),
            "moe-aux-loss-coeff": (0.05,),
            **_ONE,
        },
        {"zero-stage": 1, "expert-model-parallel-size": 2},
        2,
    ),
    "pyramid by score": (
        {"bias": "no-bias", "activation": "squared_relu"},
        {
            "num-experts": (4, 8),
            "moe-layer-freq": 1,
            "moe-router-topk": 3,
            "moe-expert-capacity-factor": 0.7,
            "moe-token-drop-policy": "probs",
            "moe-pad-expert-input-to-capacity": True,
            **_EVEN,
        },
        {"zero-stage": 3, "expert-model-parallel-size": 2, "seed": 9},
        2,
    ),
    "assigned": (
        {"bias": "bias", "activation": "gelu", "batch": "accumulated"},
        {
            "num-experts": (4,),
            "moe-layer-freq": 1,
            "moe-router-topk": 2,
            "moe-router-load-balancing-type": ("sinkhorn",),
            "moe-aux-loss-coeff": (0.0,),
            "moe-z-loss-coeff": 0.01,
        },
        {"tensor-model-parallel-size": 2, "sequence-parallel": True, "seed": 11},
        2,
    ),
    "one assigned": (
        {"bias": "no-bias", "activation": "swiglu"},
        {
            "num-experts": (4,),
            "moe-layer-freq": 2,
            "moe-router-load-balancing-type": ("sinkhorn",),
            "moe-aux-loss-coeff": (0.0,),
            "moe-router-topk": 1,
        },
        {"zero-stage": 1, "expert-model-parallel-size": 2},
        2,
    ),
    "by ids": (
        {"bias": "bias", "activation": "gelu", "batch": "accumulated", "head": "untied"},
        {
            "num-experts": (4,),
            "moe-layer-freq": 1,
            "moe-router-topk": 2,
            "moe-n-hash-layers": 1,
            "moe-z-loss-coeff": 0.02,
            **_EVEN,
        },
        {"zero-stage": 2, "expert-model-parallel-size": 2},
        2,
    ),
    "by ids, then by biases": (
        {"bias": "no-bias", "activation": "swiglu", "positions": "rope"},
        {
            "num-experts": (4,),
            "moe-layer-freq": 1,
            "moe-router-topk": 1,
            "moe-n-hash-layers": 1,
            "moe-router-score-function": "sigmoid",
            "moe-router-enable-expert-bias": True,
            "moe-router-bias-update-rate": 0.02,
            "moe-router-topk-scaling-factor": 1.5,
            **_EVEN,
        },
        {"tensor-model-parallel-size": 2, "sequence-parallel": True, "seed": 9},
        2,
    ),
    "micro-batches": (
        {"bias": "bias", "activation": "gelu", "batch": "accumulated"},
        {
            "num-experts": (4,),
            "moe-layer-freq": 2,
            "moe-router-topk": 2,
            "moe-router-pre-softmax": True,
            "moe-router-num-groups": 2,
            "moe-router-group-topk": 1,
            "moe-expert-capacity-factor": 0.6,
            "moe-min-capacity": 2,
            "moe-capacity-scope": "micro_batch",
            "moe-token-drop-policy": "position",
            "moe-router-load-balancing-type": ("aux_loss", "global_aux_loss"),
            "moe-aux-loss-coeff": (0.03, 0.02),
        },
        {},
        1,
    ),
}  # fmt: skip

# Settings that no case states, and why.
NOT_STATED = {
    "moe_input_jitter_eps": "noise is a function of its own: tests/moe/test_router.py",
    "moe_router_sampling": "the same",
    "moe_router_force_load_balancing": "the same",
    "moe_eval_capacity_factor": "the oracle only trains: tests/moe/test_capacity.py",
}


@pytest.mark.parametrize("name", CASES)
def test_product_trains_experts_as_the_oracle(name, data, tmp_path):
    of_dense, of_experts, layout, ranks = CASES[name]
    flags = flags_of(FACTORS, {"batch": "whole", "optimizer": "adam", "clip": "sometimes", **of_dense})
    if ranks == 2 and "tensor-model-parallel-size" not in layout and flags["micro-batch-size"] > 2:
        flags |= {"micro-batch-size": 2}
    flags |= of_experts | layout
    initial = product.initial_weights(flags, data)
    check_spread(flags, initial)
    source = [DATASETS[each] for each in flags["data-path"]]
    tables = product.tables(flags)
    kept, kind = partial(product.kept, flags["seed"]), partial(ExpertModel, tables=tables)
    wanted, terms, model, margin = train_experts(flags, source, initial, kept, STEPS, kind)
    assert margin > 5e-6, "a decision so close may fall otherwise in fp32; take another seed"
    records, tensors = product.train(flags, data, tmp_path, ranks)
    check_steps(records, wanted.steps, 1e-6)
    for record, step in zip(records, terms, strict=True):
        for term, mean in step.items():
            key = term if term in ("router_entropy", "dropped_tokens") else f"{term}_loss"
            assert record[key] == pytest.approx(mean, rel=1e-5), key
    assert ("dropped_tokens" in terms[0]) == ("moe-expert-capacity-factor" in flags)
    assert all(step.get("dropped_tokens", 1) > 0 for step in terms), (
        "a limit that is never reached shows nothing"
    )
    for layer in expert_layers(flags):
        state, router = model.states[layer], f"layers.{layer}.mlp.router"
        assert torch.allclose(tensors[f"{router}.load"]["router"].double(), state.load.double(), atol=1e-7)
        moved = (wanted.weights[f"{router}.weight"] - initial[f"{router}.weight"]).abs().max()
        assert moved > 1e-3
        if layer in tables:  # the first layer has one
            assert layer == 0
            assert f"{router}.bias" not in tensors
        elif "moe-router-enable-expert-bias" in flags:
            found = tensors[f"{router}.bias"]["router"].double()
            assert torch.allclose(found, state.bias.double(), atol=1e-6)
            assert found.abs().max() > 0.01
    check_tensors(tensors, wanted)


def test_every_setting_of_experts_is_stated_or_has_a_reason_not_to_be():
    stated = {f"--{flag}" for _, experts, _, _ in CASES.values() for flag in experts}
    named = {spec.path.removeprefix("model."): spec.flag for spec in FIELDS if spec.section == "model"}
    assert {name for name in EXPERT_FIELDS if named[name] not in stated} == set(NOT_STATED)
