"""Mixtral and Qwen2-MoE against transformers: the same files, the same logits."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors import safe_open

from megazero.checkpoint.naming import Table
from megazero.checkpoint.part import Key
from megazero.config.tree.model import ModelConfig
from megazero.formats.hf.config_json import TokenIds, architecture_of
from megazero.formats.hf.reader import HFReader
from megazero.formats.hf.writer import ModelFiles, write_hf
from megazero.spec.resolve import model_spec
from tests.formats.hf.expert_samples import EXPERTS, MODELS
from tests.formats.hf.samples import VOCAB, config_for, logits_of, random_weights
from tests.models.hf_weights import decoder_model
from tests.tables import over_table

transformers = pytest.importorskip("transformers")

EXTRAS = ModelFiles(TokenIds(1, 2))
TOKENS = torch.randint(VOCAB, (2, 17), generator=torch.Generator().manual_seed(5))


@over_table("name", MODELS)
def test_files_of_transformers_have_the_names_and_shapes_of_the_table(name, tmp_path):
    decoder_model(MODELS[name], VOCAB).save_pretrained(tmp_path)
    architecture = architecture_of(MODELS[name])
    rules = (*architecture.rules, *architecture.blank)
    links = Table.of(rules, model_spec(MODELS[name]), VOCAB).links
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        found = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    assert {link.theirs: link.their_shape for link in links} == found
    config = json.loads((tmp_path / "config.json").read_text())
    ours = config_for(MODELS[name])
    told_otherwise = {"bos_token_id", "eos_token_id", "attention_dropout", "initializer_range"}
    shared = (ours.keys() & config.keys()) - told_otherwise
    assert {key: ours[key] for key in shared} == {key: config[key] for key in shared}
    assert len(shared) > 15


def routed(model: torch.nn.Module, margin: float = 0.02) -> torch.nn.Module:
    """Random weights with which no choice of experts for `TOKENS` depends on a rounding error."""
    for seed in range(50):
        torch.manual_seed(seed)
        for name, parameter in model.named_parameters():
            parameter.data.copy_(torch.randn_like(parameter) * 0.15 + ("norm" in name))
        found = model(TOKENS, output_router_logits=True).router_logits
        chosen = [each.sort(-1, descending=True).values for each in found]
        k = model.config.num_experts_per_tok
        if k == EXPERTS or min(float((each[:, k - 1] - each[:, k]).min()) for each in chosen) > margin:
            return model
    raise AssertionError("no seed separates the scores")


@pytest.mark.parametrize(("name", "tp"), [*((name, 1) for name in MODELS), ("mixtral", 2), ("qwen2-moe", 2)])
def test_what_transformers_saved_computes_the_same(name, tp, tmp_path):
    theirs = decoder_model(MODELS[name], VOCAB)
    with torch.no_grad():
        theirs = routed(theirs)
        if MODELS[name].moe_shared_expert_intermediate_size is None:
            for parameter_name, parameter in theirs.named_parameters():
                parameter *= "shared_expert" not in parameter_name
        expected = theirs(TOKENS).logits
    theirs.save_pretrained(tmp_path, max_shard_size="40KB" if tp == 2 else "5GB")
    with HFReader(tmp_path) as reader:
        settings = reader.model_settings()
        assert settings.pop("vocab_size") == VOCAB
        reader.check_model(MODELS[name], VOCAB)
        logits = logits_of(reader, ModelConfig(**settings), TOKENS, tp, padded=VOCAB if tp == 1 else 110)
    assert 0.3 < expected.std() < 30  # neither dead nor saturated
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)


@over_table("name", MODELS)
def test_transformers_loads_what_was_written(name, tmp_path):
    written = write_hf(random_weights(MODELS[name]), MODELS[name], VOCAB, tmp_path / "out", extras=EXTRAS)
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert type(model).__name__ == written.architecture
    assert [len(report[kind]) for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")] == [0, 0, 0]
    block = model.model.layers[1].mlp
    weights = random_weights(MODELS[name]).tensors
    assert torch.equal(
        block.experts.gate_up_proj, weights[Key("layers.1.mlp.experts.up.weight")].flatten(1, 2)
    )
    assert torch.equal(block.experts.down_proj, weights[Key("layers.1.mlp.experts.down.weight")])
    assert torch.equal(block.gate.weight, weights[Key("layers.1.mlp.router.weight")])
