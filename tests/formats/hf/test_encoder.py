"""transformers' two kinds of BERT, there and back: the same function, the same bits, or a refusal."""

from __future__ import annotations

import json

import pytest
import torch

from megazero.checkpoint.part import Key
from megazero.commands.checkpoint.hf import main_to_hf
from megazero.config.resolve import parse_config
from megazero.config.tree.model import ModelConfig
from megazero.config.tree.tokenizer import TokenizerConfig
from megazero.errors import CheckpointError, ConfigError
from megazero.formats.hf.approximation import ONE_GELU
from megazero.formats.hf.config_json import TokenIds, architecture_of, model_of
from megazero.formats.hf.convert import convert_from_hf, convert_to_hf
from megazero.formats.hf.reader import HFReader
from megazero.formats.hf.writer import ModelFiles, write_hf
from tests.formats.hf.encoder_samples import (
    BERTS,
    MEGATRON_BERT,
    NO_HEAD,
    POST_NORM,
    TYPES_TABLE,
    UNTIED,
    WITHOUT_TYPES,
    assert_same_outputs,
    bert_folder,
    outputs_of,
    their_outputs,
)
from tests.formats.hf.model_flags import model_flags
from tests.formats.hf.samples import GPT2, VOCAB, config_for, random_weights, their_tensors, write_folder
from tests.formats.hf.test_convert import save_as_trained
from tests.formats.hf.test_writer import loaded
from tests.models.hf_weights import bert_model
from tests.tables import over_table

EXTRAS = ModelFiles(TokenIds(pad=0))
ORIGINAL = BERTS["bert"]
MIXED = MEGATRON_BERT.model_copy(update={"activation": "gelu"})


@over_table(
    ("name", "tp", "padded"),
    [*((name, 1, VOCAB) for name in BERTS), ("megatron", 2, 128), ("bert", 2, 110)],
)
def test_what_transformers_saved_computes_the_same(name, tp, padded, tmp_path):
    pytest.importorskip("transformers")
    theirs = bert_model(BERTS[name], VOCAB)
    theirs.save_pretrained(tmp_path, max_shard_size="40KB" if tp == 2 else "5GB")
    with HFReader(tmp_path) as reader:
        settings = reader.model_settings()
        assert settings.pop("vocab_size") == VOCAB
        reader.check_model(BERTS[name], VOCAB)
        found = outputs_of(reader, ModelConfig(**settings), tp, padded)
    assert_same_outputs(found, their_outputs(theirs))


@over_table("name", [*BERTS, "megatron-without-types", "bert-without-types"])
def test_transformers_loads_it_whole_and_computes_the_same(name, tmp_path):
    transformers = pytest.importorskip("transformers")
    model = BERTS.get(name) or WITHOUT_TYPES.model_copy(update=POST_NORM if name[0] == "b" else {})
    source = random_weights(model)
    for key, tensor in source.tensors.items():
        if "norm.weight" in key.name:
            tensor += 1.0
    written = write_hf(source, model, VOCAB, tmp_path / "out", max_shard_bytes=30_000, extras=EXTRAS)
    auto = getattr(transformers, written.auto)
    theirs, report = auto.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert type(theirs).__name__ == written.architecture
    assert [len(report[kind]) for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")] == [0, 0, 0]
    expected = outputs_of(source, model)
    if not model.has_token_types:
        assert not theirs.bert.embeddings.token_type_embeddings.weight.any()
    assert_same_outputs(expected, their_outputs(theirs.eval()))


@over_table("dtype", [torch.float32, torch.bfloat16])
@over_table("name", BERTS)
def test_theirs_to_ours_to_theirs_is_bit_equal(name, dtype, tmp_path):
    config = config_for(BERTS[name], torch_dtype=str(dtype).removeprefix("torch."), pad_token_id=0)
    tensors = their_tensors(BERTS[name], dtype)
    write_folder(tmp_path / "hf", config, tensors)
    imported = convert_from_hf(tmp_path / "hf", tmp_path / "run")
    exported, _ = convert_to_hf(tmp_path / "run", tmp_path / "back", dtype=dtype, max_shard_bytes=20_000)
    assert exported.architecture == imported.description.architecture.name == config["architectures"][0]
    back = loaded(tmp_path / "back")
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[key], tensors[key]) for key in tensors)
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == config


@over_table(
    ("name", "architecture"),
    [
        ("megatron", "MegatronBertForPreTraining"),
        ("megatron-masked-lm", "MegatronBertForMaskedLM"),
        ("bert", "BertForPreTraining"),
        ("bert-masked-lm", "BertForMaskedLM"),
    ],
)
def test_the_norms_and_the_heads_choose_the_class(name, architecture):
    assert architecture_of(BERTS[name]).name == architecture


def test_norms_of_the_original_are_ours_moved_on_by_one():
    theirs, ours = their_tensors(ORIGINAL), random_weights(ORIGINAL).tensors
    places = {
        "bert.embeddings.LayerNorm": "layers.0.input_norm",
        "bert.encoder.layer.0.attention.output.LayerNorm": "layers.0.mlp_norm",
        "bert.encoder.layer.0.output.LayerNorm": "layers.1.input_norm",
        "bert.encoder.layer.1.output.LayerNorm": "layers.2.input_norm",
        "bert.encoder.layer.2.attention.output.LayerNorm": "layers.2.mlp_norm",
        "bert.encoder.layer.2.output.LayerNorm": "final_norm",
    }
    for one, other in places.items():
        for kind in ("weight", "bias"):
            assert torch.equal(theirs[f"{one}.{kind}"], ours[Key(f"{other}.{kind}")])


def test_a_table_of_zeros_stands_for_no_token_types(tmp_path):
    """Zeros are written and read as none, and a second export has the same bits."""
    weights = random_weights(WITHOUT_TYPES)
    write_hf(weights, WITHOUT_TYPES, VOCAB, tmp_path / "out", extras=EXTRAS)
    tensors = loaded(tmp_path / "out")
    assert tensors[TYPES_TABLE].shape == (2, 42)
    assert not tensors[TYPES_TABLE].any()
    with HFReader.for_model(tmp_path / "out", WITHOUT_TYPES, VOCAB) as reader:
        assert reader.shapes.keys() == weights.shapes.keys()
        write_hf(reader, reader.description.model, VOCAB, tmp_path / "back", extras=EXTRAS)
    back = loaded(tmp_path / "back")
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[key], tensors[key]) for key in tensors)
    # One number that is not zero, and they are token types.
    tensors[TYPES_TABLE][1, 7] = 1e-30
    write_folder(tmp_path / "types", config_for(WITHOUT_TYPES), tensors)
    with HFReader(tmp_path / "types") as reader:
        assert reader.description.model.bert_token_types
        with pytest.raises(CheckpointError, match="`bert_token_types` is True, not False"):
            reader.check_model(WITHOUT_TYPES, VOCAB)


def test_a_missing_table_of_token_types_is_named(tmp_path):
    tensors = their_tensors(WITHOUT_TYPES)
    with pytest.raises(CheckpointError, match=f"they lack {TYPES_TABLE}$"):
        HFReader(write_folder(tmp_path, config_for(WITHOUT_TYPES), tensors))


@pytest.mark.parametrize("model", [MEGATRON_BERT, ORIGINAL], ids=["megatron", "bert"])
def test_the_class_without_the_binary_head_may_hold_it(model, tmp_path):
    """Google's own files do, and also have old names, buffers, and copies of tied tensors."""
    tensors = their_tensors(model)
    tensors["cls.predictions.decoder.weight"] = tensors["bert.embeddings.word_embeddings.weight"].clone()
    tensors["cls.predictions.decoder.bias"] = tensors["cls.predictions.bias"].clone()
    tensors["bert.embeddings.position_ids"] = torch.arange(31)[None]
    for name in [name for name in tensors if "LayerNorm" in name]:
        old = name.replace(".weight", ".gamma").replace(".bias", ".beta")
        tensors[old] = tensors.pop(name)
    name = config_for(model)["architectures"][0].replace("PreTraining", "MaskedLM")
    with HFReader(write_folder(tmp_path, config_for(model, architectures=[name]), tensors)) as reader:
        assert reader.description.architecture.name == name.replace("MaskedLM", "PreTraining")
        expected = random_weights(model).tensors
        assert reader.shapes.keys() == expected.keys()
        assert all(torch.equal(reader.tensor(key), tensor) for key, tensor in expected.items())


@over_table("kept", ["cls.predictions.bias", "cls.predictions.decoder.bias"])
@over_table("untied", [False, True])
def test_either_copy_of_the_bias_will_do(kept, untied, tmp_path):
    model = MEGATRON_BERT.model_copy(update=UNTIED if untied else {})
    tensors = their_tensors(model)
    bias = tensors.pop("cls.predictions.bias")
    tensors.pop("cls.predictions.decoder.bias", None)
    tensors[kept] = bias
    with HFReader(write_folder(tmp_path, config_for(model), tensors)) as reader:
        assert torch.equal(reader.tensor(Key("head.bias")), bias)


@over_table(
    ("untied", "name", "message"),
    [
        (False, "cls.predictions.decoder.bias", "differs from cls.predictions.bias, although `tie_word"),
        (
            True,
            "cls.predictions.decoder.bias",
            "differs from cls.predictions.bias, of which it must be a copy",
        ),
        (False, "cls.predictions.decoder.weight", "differs from bert.embeddings.word_embeddings.weight, al"),
    ],
)
def test_copies_that_differ_are_refused(untied, name, message, tmp_path):
    model = MEGATRON_BERT.model_copy(update=UNTIED if untied else {})
    shape = (VOCAB,) if name.endswith("bias") else (VOCAB, 42)
    folder = bert_folder(tmp_path, model, config_for(model), **{name: torch.ones(shape)})
    with pytest.raises(CheckpointError, match=f"{name} {message}"):
        HFReader(folder)


def test_a_missing_head_is_named(tmp_path):
    tensors = {name: t for name, t in their_tensors(ORIGINAL).items() if not name.startswith("cls.")}
    bare = {name.removeprefix("bert."): tensor for name, tensor in tensors.items()}
    for held in (tensors, bare):
        with pytest.raises(
            CheckpointError, match=r"they lack cls.predictions.bias, .*, cls.seq_relationship.weight$"
        ):
            HFReader(write_folder(tmp_path, config_for(ORIGINAL), held))
    with pytest.raises(CheckpointError, match=r"`architectures` must be one of .* but is \['BertModel'\]"):
        HFReader(write_folder(tmp_path, config_for(ORIGINAL, architectures=["BertModel"]), bare))
    tensors = their_tensors(ORIGINAL)
    del tensors["cls.seq_relationship.weight"], tensors["cls.seq_relationship.bias"]
    with pytest.raises(
        CheckpointError, match=r"they lack cls.seq_relationship.bias, cls.seq_relationship.we"
    ):
        HFReader(write_folder(tmp_path, config_for(ORIGINAL), tensors))


def test_defaults_are_those_of_transformers():
    for model_type, size in (("bert", 768), ("megatron-bert", 768)):
        config = {"model_type": model_type, "hidden_size": size}
        architecture = next(
            each for each in map(architecture_of, BERTS.values()) if each.model_type == model_type
        )
        model = model_of(architecture, config)
        assert (model.norm_epsilon, model.activation, model.bert_head_activation) == (
            1e-12,
            "gelu_exact",
            "gelu_exact",
        )
        assert (model.positions, model.untie_embeddings_and_output_weights) == (512, False)
    transformers = pytest.importorskip("transformers")
    assert (
        transformers.BertConfig().layer_norm_eps == transformers.MegatronBertConfig().layer_norm_eps == 1e-12
    )


def test_epsilon_is_always_written():
    assert config_for(MEGATRON_BERT.model_copy(update={"norm_epsilon": 1e-12}))["layer_norm_eps"] == 1e-12
    assert config_for(ORIGINAL)["layer_norm_eps"] == 3e-4


@over_table(
    ("changed", "message"),
    [
        ({"type_vocab_size": 3}, "`type_vocab_size` must be 2, but is 3"),
        ({"position_embedding_type": "relative_key"}, "`position_embedding_type` must be absolute"),
        ({"is_decoder": True}, "`is_decoder` must be False"),
        ({"add_cross_attention": True}, "`add_cross_attention` must be absent"),
        ({"hidden_act": "relu"}, "`hidden_act` must be one of gelu, gelu_new, gelu_pytorch_tanh"),
        ({"num_attention_heads": 5}, "the hidden size must be a multiple of the number of heads"),
        ({"architectures": ["BertForQuestionAnswering"]}, "`architectures` must be one of "),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_ours_has_not_is_refused_by_field(changed, message, tmp_path):
    folder = bert_folder(tmp_path, ORIGINAL, config_for(ORIGINAL, **changed))
    with pytest.raises(CheckpointError, match=message):
        HFReader(folder)


def test_megatron_s_mix_of_gelus_has_no_exact_form():
    with pytest.raises(CheckpointError) as refusal:
        architecture_of(MIXED)
    message = str(refusal.value)
    assert "MegatronBertForPreTraining: `bert_head_activation` must be `activation`" in message
    assert "`pretrain_bert.py --no-bias-gelu-fusion`" in message
    assert "`--approximate-gelu`" in message
    assert "ForMaskedLM" not in message  # against which there is the same, and more


def test_an_approximation_is_written_only_if_asked_for(tmp_path, capsys):
    exact = MEGATRON_BERT.model_copy(update={"activation": "gelu", "bert_head_activation": "gelu"})
    run = save_as_trained(tmp_path / "run", MIXED, TokenizerConfig(), weights=random_weights(exact).tensors)
    assert main_to_hf([str(run), str(tmp_path / "a"), "--no-tokenizer"]) == 1
    assert "`--approximate-gelu` writes" in capsys.readouterr().err
    assert not (tmp_path / "a").exists()
    assert main_to_hf([str(run), str(tmp_path / "a"), "--no-tokenizer", "--approximate-gelu"]) == 0
    said = capsys.readouterr().out
    assert "AutoModelForPreTraining.from_pretrained" in said
    assert "outputs differ slightly" in said
    assert json.loads((tmp_path / "a" / "config.json").read_text())["hidden_act"] == "gelu_new"
    assert not (tmp_path / "a" / "generation_config.json").exists()
    with HFReader(tmp_path / "a") as reader:
        mixed, same = (outputs_of(reader, model)[0] for model in (MIXED, reader.description.model))
    assert 0 < (mixed - same).abs().max() < 0.01


@pytest.mark.parametrize("model", [GPT2, MEGATRON_BERT], ids=["gpt2", "bert"])
def test_an_approximation_of_what_is_exact_is_refused(model, tmp_path):
    write_folder(tmp_path / "hf", config_for(model), their_tensors(model))
    convert_from_hf(tmp_path / "hf", tmp_path / "run")
    with pytest.raises(ConfigError, match="`--approximate-gelu` must be given for a model with two forms"):
        convert_to_hf(tmp_path / "run", tmp_path / "out", approximations=[ONE_GELU])


def test_the_padded_vocabulary_of_the_hub_keeps_its_size(tmp_path):
    """Megatron's models there have 29,056 or 30,592 rows, multiples of 128, which all are entries."""
    model = MEGATRON_BERT.model_copy(update={"num_layers": 1, "hidden_size": 12, "num_attention_heads": 2})
    source = random_weights(model, 29056)
    write_hf(source, model, 29056, tmp_path / "out", extras=EXTRAS)
    with HFReader(tmp_path / "out") as reader:
        assert reader.model_settings()["vocab_size"] == 29056
        assert reader.shapes[Key("head.bias")] == (29056,)


@over_table("name", BERTS)
def test_the_flags_that_are_printed_make_the_model(name):
    model = BERTS[name].model_copy(update={"vocab_size": VOCAB})
    flags = [word for line in model_flags(model) for word in line.split()]
    flags += ["--micro-batch-size", "1", "--lr", "1e-3", "--train-iters", "1", "--mock-data"]
    assert parse_config(flags).config.model == model


def test_token_types_can_be_kept_without_the_binary_head():
    model = ModelConfig.model_validate({**MEGATRON_BERT.model_dump(), **NO_HEAD})
    assert (model.has_token_types, WITHOUT_TYPES.has_token_types) == (True, False)
