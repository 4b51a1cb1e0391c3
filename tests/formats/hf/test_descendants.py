"""Descendants of Llama against transformers: the same files, the same logits, there and back."""

from __future__ import annotations

import json

import pytest
import torch

from megazero.checkpoint.box import gaps_or_overlaps
from megazero.checkpoint.naming import Table
from megazero.checkpoint.part import WEIGHT
from megazero.config.tree.model import ModelConfig
from megazero.formats.hf.config_json import architecture_of
from megazero.formats.hf.convert import convert_from_hf, convert_to_hf
from megazero.formats.hf.reader import HFReader
from megazero.spec.resolve import model_spec
from tests.formats.hf.descendants import SAMPLES
from tests.formats.hf.samples import VOCAB, logits_of, parameter_specs
from tests.formats.hf.test_writer import loaded
from tests.models.hf_weights import expert_by_expert
from tests.tables import over_table

transformers = pytest.importorskip("transformers")

TOKENS = torch.randint(VOCAB, (2, 17), generator=torch.Generator().manual_seed(5))


@over_table("name", SAMPLES)
def test_tables_hold_every_element_of_our_model_once(name):
    sample = SAMPLES[name]
    table = Table.of(
        architecture_of(sample.ours, f"{sample.name}ForCausalLM").rules, model_spec(sample.ours), VOCAB
    )
    weights = {key.name: shape for key, shape in table.shapes.items() if key.kind == WEIGHT}
    assert weights == parameter_specs(sample.ours)
    for key, links in table.by_key.items():
        assert gaps_or_overlaps(table.shapes[key], [link.box for link in links]) is None


@pytest.mark.parametrize("name", SAMPLES)
def test_what_transformers_saved_computes_the_same_and_goes_back_as_it_was(name, tmp_path):
    sample = SAMPLES[name]
    theirs = sample.build()
    with torch.no_grad():
        expected = theirs(TOKENS).logits
    theirs.save_pretrained(tmp_path / "hf")
    with HFReader(tmp_path / "hf") as reader:
        settings = reader.model_settings()
        assert settings.pop("vocab_size") == VOCAB
        reader.check_model(sample.ours, VOCAB)
        for tp in (1, 2):
            padded = VOCAB if tp == 1 else 110
            logits = logits_of(reader, ModelConfig(**settings), TOKENS, tp, padded)
            torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)
    assert 0.3 < expected.std() < 30  # neither dead nor saturated
    convert_from_hf(tmp_path / "hf", tmp_path / "run")
    convert_to_hf(tmp_path / "run", tmp_path / "back", max_shard_bytes=20_000)
    first, back = loaded(tmp_path / "hf"), loaded(tmp_path / "back")
    assert back.keys() == first.keys()
    assert all(torch.equal(back[key], first[key]) for key in first)
    again, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "back", output_loading_info=True, attn_implementation="eager"
    )
    assert type(again) is type(theirs)
    again = expert_by_expert(again)
    assert [len(report[kind]) for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")] == [0, 0, 0]
    with torch.no_grad():
        assert torch.equal(again(TOKENS).logits, expected)
    # What is written of one model is always the same.
    convert_from_hf(tmp_path / "back", tmp_path / "run2")
    convert_to_hf(tmp_path / "run2", tmp_path / "back2")
    configs = [json.loads((tmp_path / out / "config.json").read_text()) for out in ("back", "back2")]
    assert configs[0] == configs[1]
