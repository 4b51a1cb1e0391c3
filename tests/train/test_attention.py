"""What a run says of its attention, and whether its shapes stay the same."""

from __future__ import annotations

import pytest
import torch

from megazero.ops import native
from megazero.ops.attention import BiasKind, HeadKind, MaskKind
from megazero.spec.resolve import model_spec
from megazero.train import process
from megazero.train.parts.attention import attention_facts, attention_remarks, shapes_vary
from megazero.train.parts.chunks import DTYPES
from tests.config.samples import make_config
from tests.tables import over_table

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@over_table(
    ("changes", "varies"),
    [
        ({}, False),
        ({"data.reset_attention_mask": True}, False),
        ({"model.family": "bert"}, True),
        ({"model.family": "t5"}, True),
        ({"model.num_classes": 2}, True),
        ({"skipping.random_ltd": True}, True),
        ({"curriculum.seqlen_schedule": "fixed_linear"}, True),
    ],
)
def test_shapes_vary_where_columns_or_tokens_are_left_out(changes, varies):
    config = make_config(changes)
    assert shapes_vary(config.curriculum, config.skipping, config.model) == varies


def facts_of(config, device):
    dtype, documents = DTYPES[config.precision.dtype], config.data.reset_attention_mask
    return attention_facts(model_spec(config.model), dtype, device, documents=documents)


def test_the_kind_of_mask_is_that_of_the_run_on_its_device():
    packed, bert = make_config({"data.reset_attention_mask": True}), make_config({"model.family": "bert"})
    kinds = [[facts_of(c, d).mask.value for d in (CPU, GPU)] for c in (make_config(), packed, bert)]
    assert kinds == [["causal", "causal"], ["causal", "runs"], ["none", "runs"]]
    facts = facts_of(make_config({"model.hidden_size": 1024, "precision.dtype": "bf16"}), GPU)
    assert (facts.heads, facts.dropout, facts.dtype) == (HeadKind.WIDE, True, torch.bfloat16)
    assert facts.mask is MaskKind.CAUSAL


def test_windows_biases_and_offsets_are_facts():
    """A window among documents is told to kernels by the documents' bounds; first keys are a pattern."""
    window = {"model.window_size": (8, 0)}
    packed, first = {"data.reset_attention_mask": True}, {"model.window_sink_tokens": 2}
    several = (window, {**window, **packed}, {**window, **first}, {**window, **packed, **first})
    kinds = [[facts_of(make_config(c), d).mask.value for d in (CPU, GPU)] for c in several]
    assert kinds == [
        ["window", "window"],
        ["window", "documents"],
        ["pattern", "pattern"],
        ["pattern", "pattern"],
    ]
    facts = facts_of(make_config({"model.softmax_type": "learnable"}), CPU)
    assert (facts.lse, facts.bias) == (True, BiasKind.NONE)
    facts = facts_of(make_config({"model.position_embedding_type": "alibi"}), CPU)
    assert (facts.lse, facts.bias) == (False, BiasKind.SLOPES)
    pairs = {"model.family": "t5", "model.position_embedding_type": "relative"}
    facts = facts_of(make_config(pairs), GPU)
    assert (facts.mask, facts.bias) == (MaskKind.DENSE, BiasKind.TENSOR)


@pytest.mark.skipif(not native.available(), reason="the compiled kernels are not built")
def test_the_remark_names_the_implementation():
    assert list(attention_remarks(make_config(), CPU)) == [
        "attention: native_cpu on cpu (float32, causal, dropout)"
    ]
    plain = make_config({"model.attention_dropout": 0.0, "acceleration.compile": True})
    assert list(attention_remarks(plain, CPU)) == ["attention: sdpa on cpu (float32, causal)"]


def test_the_remark_says_if_all_pairs_are_held(monkeypatch):
    monkeypatch.setattr("megazero.ops.cuda._BACKEND", type("Backend", (), {"library": None})())
    assert list(attention_remarks(make_config(), GPU)) == [
        "attention: composed on cuda (float32, causal, dropout), which holds a tensor of all pairs"
    ]


@pytest.mark.parametrize(("family", "left"), [("gpt", True), ("bert", False)])
def test_a_run_whose_shapes_vary_leaves_cudnn_out(family, left, monkeypatch):
    """torch prefers cuDNN's attention, which makes a plan for each shape."""

    class Reporting:
        def __enter__(self):
            return None

        def __exit__(self, *error):
            return None

    for name in ("keep_freed_memory", "leave", "join"):
        monkeypatch.setattr(process, name, lambda *given, **named: None)
    monkeypatch.setattr(process, "reporting", lambda joined: Reporting())
    before = torch.backends.cuda.cudnn_sdp_enabled()
    launch = type("Place", (), {"speaks_for_node": True})()
    monkeypatch.setattr(process, "replicas_per_node", lambda zero: 1)
    try:
        torch.backends.cuda.enable_cudnn_sdp(True)
        work = lambda joined: torch.backends.cuda.cudnn_sdp_enabled()  # noqa: E731
        run = make_config({"model.family": family})
        assert process.in_job(run, launch, work) == left
        assert torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
