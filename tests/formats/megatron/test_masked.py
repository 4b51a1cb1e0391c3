"""BERTs of Megatron-LM and Megatron-DeepSpeed: every layout, dialect and version gives the same weights."""

from __future__ import annotations

import json

import pytest

from megazero.checkpoint.folder import iteration_folder
from megazero.checkpoint.reader import CheckpointReader
from megazero.commands.checkpoint.megatron import main_import_megatron
from megazero.config.tree.model import ModelConfig
from megazero.errors import CheckpointError
from megazero.formats.megatron.reader import ImportOptions, MegatronReader
from tests.formats.megatron.masked_samples import (
    BERT,
    MODELS,
    WITHOUT_HEAD,
    random_weights,
    save_bert,
    save_bert_deepspeed,
)
from tests.formats.megatron.samples import PADDED, VOCAB, Layout, edit
from tests.formats.megatron.test_reader import assert_same, read_all
from tests.tables import over_table

TRUSTED = ImportOptions(trust_pickle=True, vocab_size=VOCAB)
POST_NORM = {"apply_residual_connection_post_layernorm": True}


@over_table("name", MODELS)
@over_table(
    "layout",
    [
        *(
            Layout(tp, pp, dialect=dialect)
            for tp, pp in ((1, 1), (2, 2))
            for dialect in ("core", "fused", "old")
        ),
        Layout(2, 1),
        Layout(1, 4),
    ],
    ids=lambda layout: f"T{layout.tp}P{layout.pp}-{layout.dialect}",
)
def test_megatron(tmp_path, name, layout):
    model, weights = MODELS[name], random_weights(MODELS[name])
    save_bert(tmp_path, model, weights, layout)
    with MegatronReader(tmp_path, TRUSTED) as reader:
        assert_same(read_all(reader), weights)
        assert reader.model == model
        assert reader.padded_vocab_size == PADDED
        assert ModelConfig.model_validate(reader.model_settings()) == model


@over_table("version", [None, 0.0, 1.0, 2.0, 3.0])
def test_versions_order_queries_keys_and_values_differently(tmp_path, version):
    weights = random_weights(BERT)
    save_bert(tmp_path, BERT, weights, Layout(2, version=version, dialect="old"))
    assert_same(read_all(MegatronReader(tmp_path, TRUSTED)), weights)


@over_table("name", MODELS)
@over_table("tp", [1, 2])
def test_deepspeed(tmp_path, name, tp):
    model, weights = MODELS[name], random_weights(MODELS[name])
    save_bert_deepspeed(tmp_path, model, weights, Layout(tp, dialect="old"))
    reader = MegatronReader(tmp_path, ImportOptions(trust_pickle=True))
    assert_same(read_all(reader), weights)
    assert reader.model == model


def test_a_head_of_its_own_is_kept(tmp_path):
    untied = {"untie_embeddings_and_output_weights": True}
    model = BERT.model_copy(update=untied)
    weights = random_weights(model)
    assert "head.weight" in weights
    save_bert(tmp_path, model, weights, Layout(2, 2))
    assert_same(read_all(MegatronReader(tmp_path, TRUSTED)), weights)


def test_a_copy_of_the_embedding_must_be_one(tmp_path):
    save_bert(tmp_path, BERT, random_weights(BERT), Layout(1, 2))
    path = tmp_path / "iter_0000100" / "mp_rank_00_001" / "model_optim_rng.pt"
    edit(path, lambda saved: saved["model"]["output_layer.weight"][3, 3].add_(1))
    with pytest.raises(CheckpointError, match=r"holds output_layer.weight, which differs from the embedding"):
        MegatronReader(tmp_path, TRUSTED)


@over_table(
    ("arguments", "settings"),
    [
        ({}, {"activation": "gelu", "bert_head_activation": "gelu_exact"}),
        ({"bias_gelu_fusion": False}, {"activation": "gelu_exact", "bert_head_activation": "gelu_exact"}),
        ({"openai_gelu": True}, {"activation": "gelu", "bert_head_activation": "gelu"}),
        (POST_NORM, POST_NORM),
    ],
    ids=lambda value: "-".join(value),
)
def test_arguments_become_settings(tmp_path, arguments, settings):
    save_bert_deepspeed(tmp_path, BERT, random_weights(BERT), Layout(dialect="old", arguments=arguments))
    model = MegatronReader(tmp_path, TRUSTED).model
    assert {name: getattr(model, name) for name in settings} == settings


def test_what_core_ignores_is_refused(tmp_path):
    """Core has pre-LayerNorm, whatever its argument says."""
    save_bert(tmp_path, BERT, random_weights(BERT), Layout(arguments=POST_NORM))
    with pytest.raises(CheckpointError, match=r"`apply_residual_.* is True, which Core ignores \(unset it"):
        MegatronReader(tmp_path, TRUSTED)


def test_norms_less_one_are_refused_where_the_heads_was_not(tmp_path):
    """Before Core, some versions made the head's norm without `apply_layernorm_1p`."""
    less_one = {"apply_layernorm_1p": True}
    save_bert_deepspeed(
        tmp_path / "old", BERT, random_weights(BERT), Layout(dialect="old", arguments=less_one)
    )
    with pytest.raises(CheckpointError, match=r"`apply_layernorm_1p` is True \(but not for all norms"):
        MegatronReader(tmp_path / "old", TRUSTED)
    save_bert(tmp_path / "core", BERT, random_weights(BERT), Layout(arguments=less_one))
    assert MegatronReader(tmp_path / "core", TRUSTED).model.apply_layernorm_1p


def test_token_types_without_the_binary_head_are_kept(tmp_path):
    model = WITHOUT_HEAD.model_copy(update={"bert_token_types": True})
    weights = random_weights(model)
    assert "embedding.token_type.weight" in weights
    save_bert(tmp_path, model, weights, Layout(2))
    reader = MegatronReader(tmp_path, TRUSTED)
    assert_same(read_all(reader), weights)
    assert reader.model == model


def test_a_missing_part_of_a_head_is_named(tmp_path):
    save_bert(tmp_path, BERT, random_weights(BERT), Layout())
    path = tmp_path / "iter_0000100" / "mp_rank_00" / "model_optim_rng.pt"
    edit(path, lambda saved: saved["model"].pop("pooler.dense.bias"))
    with pytest.raises(CheckpointError, match=r"lacks pooler.dense.bias$"):
        MegatronReader(tmp_path, TRUSTED)


def test_the_command_writes_a_checkpoint(tmp_path, capsys):
    weights = random_weights(BERT)
    save_bert(tmp_path / "theirs", BERT, weights, Layout(2, 2))
    argv = [str(tmp_path / "theirs"), str(tmp_path / "ours"), "--trust-pickle", "--vocab-size", str(VOCAB)]
    assert main_import_megatron(argv) == 0
    assert "2 tensor-parallel ranks x 2 pipeline stages" in capsys.readouterr().out
    reader = CheckpointReader(iteration_folder(tmp_path / "ours", 0))
    assert {key.name for key in reader.shapes} == weights.keys()
    assert json.loads(json.dumps(dict(reader.facts["model"])))["family"] == "bert"
