"""Mixtures of experts and Hugging Face, from and to any layout: the same bits, and transformers' logits."""

from __future__ import annotations

import pytest
import torch

from megazero.config.tree.checkpoint import CheckpointConfig
from megazero.config.tree.config import Config
from megazero.models.batch import Batch
from megazero.mpu.context import solo_context
from megazero.train.parts.chunks import build_chunks
from megazero.train.parts.vocabulary import Vocabulary
from tests.equivalence.test_hf_layouts import export
from tests.layouts.layout import SEQUENCE, VOCABULARY, Layout
from tests.models.hf_weights import expert_by_expert

KINDS = {
    "mixtral": {"num_experts": (4,)},
    "qwen2-moe": {
        "num_experts": (4,),
        "expert_interval": 2,
        "add_qkv_bias": True,
        "moe_router_pre_softmax": True,
        "moe_ffn_hidden_size": 24,
        "moe_shared_expert_intermediate_size": 32,
        "moe_shared_expert_gate": True,
    },
}
PLACES = (
    Layout(),
    Layout(tp=2),
    Layout(tp=4, sequence_parallel=True),
    Layout(dp=2, ep=2),
    Layout(dp=4, ep=2, zero=3),
    Layout(dp=4, ep=4, zero=1),
    Layout(tp=2, dp=2, ep=2, zero=2),
    Layout(tp=2, dp=2, ep=4, etp=1),
    Layout(pp=2, dp=2, ep=2, zero=1),
    Layout(pp=2, schedule="zb-v", layers=4),
)
SOME = (PLACES[2], PLACES[4], PLACES[7], PLACES[8])  # of each axis


def config_of(layout: Layout, kind: str, seed: int = 1234, **checkpoint: str) -> Config:
    """The layout's configuration for a model of four layers, whatever it has itself."""
    config = layout.config()
    shape = Layout(shape="llama", untied=True, layers=4).config().model
    # Without padding on one tensor-parallel rank, with it on several.
    model = shape.model_copy(update={"make_vocab_size_divisible_by": 1, **KINDS[kind]})
    sections = {
        "model": model,
        "checkpoint": CheckpointConfig(**checkpoint),
        "training": config.training.model_copy(update={"seed": seed}),
    }
    return config.model_copy(update=sections)


@pytest.mark.parametrize(
    ("kind", "places"),
    [("mixtral", SOME), ("qwen2-moe", SOME), pytest.param("mixtral", PLACES[1:], marks=pytest.mark.slow)],
    ids=["mixtral", "qwen2-moe", "mixtral, all places"],
)
def test_every_layout_is_one_model_there_and_back(kind, places, tmp_path):
    first = export(Layout(), config_of(Layout(), kind, save=str(tmp_path / "run0")), tmp_path / "out0")
    if kind == "qwen2-moe":
        assert first["model.layers.0.self_attn.q_proj.bias"].shape == (32,)
    for number, layout in enumerate(places, 1):
        # From this layout: its own weights, which are those of the seed on every layout.
        config = config_of(layout, kind, save=str(tmp_path / f"run{number}"))
        found = export(layout, config, tmp_path / f"out{number}")
        assert found.keys() == first.keys()
        assert all(torch.equal(found[name], first[name]) for name in first), layout.name
        # To it and back: with another seed, so that all must have been loaded.
        checkpoint = {"save": str(tmp_path / f"back{number}"), "load_hf": str(tmp_path / "out0")}
        back = export(layout, config_of(layout, kind, 4321, **checkpoint), tmp_path / f"again{number}")
        assert all(torch.equal(back[name], first[name]) for name in first), layout.name


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_transformers(kind, tmp_path):
    """From the layout that cuts experts most; all others write the same bits."""
    transformers = pytest.importorskip("transformers")
    layout = PLACES[7]
    export(layout, config_of(layout, kind, save=str(tmp_path / "run")), tmp_path / "out")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    vocabulary = Vocabulary(VOCABULARY, VOCABULARY, None, None)
    ours = build_chunks(config_of(Layout(), kind), vocabulary, solo_context(), torch.device("cpu"))[0]
    tokens = torch.arange(2 * SEQUENCE).view(2, SEQUENCE) % VOCABULARY
    with torch.no_grad():
        logits = ours(Batch(tokens)).transpose(0, 1)[..., :VOCABULARY]
        torch.testing.assert_close(expert_by_expert(theirs)(tokens).logits, logits, rtol=0, atol=1e-5)
    assert logits.std() > 0.1
