"""Fine-tuned BERTs as transformers' classifiers, there and back: the same scores, bits and class names."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from megazero.checkpoint.shards import parts_of_parameters
from megazero.commands.checkpoint.hf import main_from_hf, main_to_hf
from megazero.config.resolve import parse_config
from megazero.config.tree.model import ModelConfig
from megazero.config.tree.tokenizer import TokenizerConfig
from megazero.errors import CheckpointError, ConfigError
from megazero.formats.hf.approximation import ONE_GELU
from megazero.formats.hf.architectures import ARCHITECTURES
from megazero.formats.hf.config_json import TokenIds, architecture_of, objections
from megazero.formats.hf.convert import convert_from_hf, convert_to_hf
from megazero.formats.hf.reader import HFReader
from megazero.formats.hf.writer import ModelFiles, write_hf
from megazero.layers.placement import Placement
from megazero.models.chunk import Slice
from megazero.models.classifier import FirstTokenClassifier
from megazero.models.classifier_batch import ClassifierCollate
from megazero.mpu.context import thread_context
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.thread_group import ThreadWorld
from megazero.spec.resolve import model_spec
from tests.formats.hf.encoder_samples import (
    LENGTHS,
    MEGATRON_BERT,
    POST_NORM,
    TANH,
    TYPES_TABLE,
    bert_folder,
    random_input,
)
from tests.formats.hf.model_flags import model_flags
from tests.formats.hf.samples import (
    GPT2,
    LLAMA,
    VOCAB,
    config_for,
    random_weights,
    their_tensors,
    write_folder,
)
from tests.formats.hf.test_convert import save_as_trained
from tests.formats.hf.test_writer import loaded
from tests.tables import over_table

NAMES = ("no", "never mind", "\u0434\u0430", "LABEL_0")
NO_TYPES = {"bert_binary_head": False}
MIXED = {"activation": "gelu"}
CLASSIFIERS = {
    f"{norm}-{suffix}": MEGATRON_BERT.model_copy(update={**places, **update})
    for norm, places in (("megatron", {}), ("bert", POST_NORM))
    for suffix, update in (
        ("classes", {"num_classes": 4}),
        ("choices", {"num_classes": 1}),
        ("no-types", {"num_classes": 4, **NO_TYPES}),
        ("tanh", {"num_classes": 2, **TANH}),
        ("two-gelus", {"num_classes": 3, **MIXED}),
    )
}
CHOICES = 3


def batch_of(model: ModelConfig):
    """A batch with one sample for each row, or with one sample whose choices are the rows."""
    tokens, types = (each.numpy() for each in random_input())
    shape = (1, CHOICES, -1) if model.num_classes == 1 else (CHOICES, 1, -1)
    if not model.has_token_types:
        types = np.zeros_like(types)
    arrays = {"tokens": tokens.reshape(shape), "token_types": types.reshape(shape)}
    arrays["lengths"] = np.array(LENGTHS).reshape(shape[:2])
    arrays["labels"] = np.zeros(shape[0], dtype=np.int64)
    collate = ClassifierCollate(VOCAB, torch.device("cpu"), causal=False, marked=True)
    return collate(arrays, tuple(range(shape[0])))


def scores_of(source, model: ModelConfig, tp: int = 1) -> torch.Tensor:
    """megazero's scores of a padded batch: [samples, classes or choices]."""
    world, batch = ThreadWorld(tp), batch_of(model)

    def work(rank: int) -> torch.Tensor:
        context = thread_context(world, ProcessGrid(tp=tp), rank)
        classifier = FirstTokenClassifier(
            Slice(model_spec(model), (VOCAB, 128), Placement.of(context, torch.float32))
        )
        with torch.no_grad():
            source.read(parts_of_parameters(classifier.parameters(), context))
            return classifier(batch)

    return world.run(work)[-1]


def their_scores(theirs: torch.nn.Module, model: ModelConfig) -> torch.Tensor:
    """transformers' scores, in the shape of `scores_of`."""
    tokens, types = random_input()
    mask = (torch.arange(31) < torch.tensor(LENGTHS)[:, None]).long()
    inputs = {"input_ids": tokens, "attention_mask": mask, "token_type_ids": types}
    if model.num_classes == 1:
        inputs = {name: each[None] for name, each in inputs.items()}
    with torch.no_grad():
        return theirs(**inputs).logits


def assert_same_scores(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Assert that scores are equal to 1e-5, and differ between samples."""
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    assert 0.02 < expected.std() < 30


@over_table(
    ("name", "tp"), [(name, 1 + name.endswith("-classes")) for name in CLASSIFIERS if "types" not in name]
)
def test_what_transformers_saved_scores_the_same(name, tp, tmp_path):
    transformers = pytest.importorskip("transformers")
    model = CLASSIFIERS[name]
    architecture = architecture_of(model)
    settings = config_for(model)
    del settings["architectures"], settings["torch_dtype"]
    config = getattr(transformers, architecture.name.split("For")[0] + "Config")(**settings)
    theirs = getattr(transformers, architecture.name)(config).eval()
    torch.manual_seed(3)
    for parameter in theirs.parameters():
        parameter.data += 0.15 * torch.randn_like(parameter)
    theirs.save_pretrained(tmp_path)
    with HFReader(tmp_path) as reader:
        assert reader.description.architecture is architecture
        found = scores_of(reader, reader.description.model, tp)
        reader.check_model(model, VOCAB, frozenset({"bert_head_activation"}))
    assert_same_scores(found, their_scores(theirs, model))


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_transformers_loads_it_whole_and_scores_the_same(name, tmp_path):
    transformers = pytest.importorskip("transformers")
    model = CLASSIFIERS[name]
    source = random_weights(model)
    for key, tensor in source.tensors.items():
        if "norm.weight" in key.name:
            tensor += 1.0
    labels = NAMES if model.num_classes == 4 else ()
    extras = ModelFiles(TokenIds(pad=0), labels=labels)
    written = write_hf(source, model, VOCAB, tmp_path / "out", max_shard_bytes=30_000, extras=extras)
    auto = getattr(transformers, written.auto)
    theirs, report = auto.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert type(theirs).__name__ == written.architecture
    assert [len(report[kind]) for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")] == [0, 0, 0]
    if labels:
        assert theirs.config.id2label == dict(enumerate(NAMES))
        assert theirs.config.label2id == {name: number for number, name in enumerate(NAMES)}
    elif model.num_classes > 1:
        assert theirs.config.num_labels == model.num_classes
    assert_same_scores(scores_of(source, model), their_scores(theirs.eval(), model))


@over_table("name", [name for name in CLASSIFIERS if "two" not in name])
def test_theirs_to_ours_to_theirs_is_bit_equal(name, tmp_path):
    model, out = CLASSIFIERS[name], tmp_path / "hf"
    extras = ModelFiles(TokenIds(1, 2, 0), labels=NAMES if model.num_classes == 4 else ())
    write_hf(random_weights(model), model, VOCAB, out, extras=extras)
    imported = convert_from_hf(out, tmp_path / "run")
    assert imported.description.labels == (
        NAMES if extras.labels else ("LABEL_0", "LABEL_1")[: 2 * (name[-1] == "h")]
    )
    assert (imported.description.model.num_classes, imported.description.model.has_token_types) == (
        model.num_classes,
        model.has_token_types,
    )
    exported, _ = convert_to_hf(tmp_path / "run", tmp_path / "back")
    assert exported.architecture == imported.description.architecture.name == architecture_of(model).name
    there, back = loaded(out), loaded(tmp_path / "back")
    assert back.keys() == there.keys()
    assert all(torch.equal(back[key], there[key]) for key in there)
    assert bool(there[TYPES_TABLE].any()) == model.has_token_types
    assert (tmp_path / "back" / "config.json").read_text() == (out / "config.json").read_text()


@over_table(
    ("name", "expected"),
    [
        ("megatron-classes", "MegatronBertForSequenceClassification"),
        ("megatron-choices", "MegatronBertForMultipleChoice"),
        ("bert-no-types", "BertForSequenceClassification"),
        ("bert-choices", "BertForMultipleChoice"),
    ],
)
def test_the_norms_and_the_number_of_classes_choose_the_class(name, expected):
    assert architecture_of(CLASSIFIERS[name]).name == expected


def test_only_rows_for_classifiers_take_one():
    for model in (*CLASSIFIERS.values(), MEGATRON_BERT, GPT2, GPT2.model_copy(update={"num_classes": 3})):
        for each in ARCHITECTURES:
            assert objections(each, model) or each.classifies == (model.num_classes is not None)


@pytest.mark.parametrize("model", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_a_classifier_on_the_last_token_is_refused(model, tmp_path, capsys):
    with pytest.raises(CheckpointError, match="unset or 1 for a model of .* but is 3: .*GPT2ForSeq"):
        architecture_of(model.model_copy(update={"num_classes": 3}))
    weights = random_weights(model).tensors
    run = save_as_trained(
        tmp_path / "run", model.model_copy(update={"num_classes": 3}), TokenizerConfig(), weights
    )
    assert main_to_hf([str(run), str(tmp_path / "out"), "--no-tokenizer"]) == 1
    assert "GPT2ForSequenceClassification, have no bias" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    folder = write_folder(
        tmp_path / "hf", config_for(model, architectures=["OPTForSequenceClassification"]), {}
    )
    with pytest.raises(CheckpointError, match=r"but is \['OPTForSequenceClassification'\]"):
        HFReader(folder)


@over_table(
    ("changed", "message"),
    [
        ({"problem_type": "regression"}, "`problem_type` must be single_label_classification, but is .regr"),
        ({"problem_type": "multi_label_classification"}, "`problem_type` must be single_label_class"),
        ({"id2label": {"0": "score"}}, "two classes or more, as transformers takes one"),
        ({"id2label": None, "num_labels": 1}, "two classes or more, as transformers takes one"),
        ({"id2label": None, "num_labels": "4"}, "`num_labels` must be a int, but is '4'"),
        ({"num_labels": 3}, "`num_labels` must be 4 as in `id2label`, but is 3"),
        ({"id2label": {"1": "a", "2": "b"}}, "`id2label` must name the classes 0, 1, "),
        ({"id2label": ["a", "b"]}, "`id2label` must name the classes 0, 1, "),
        ({"id2label": {"0": "a", "1": "a"}}, "`id2label` must give each class a name of its own"),
        ({"id2label": {"0": "a", "1": "\ud800"}}, "`id2label` must be text that can be written"),
        ({"id2label": {"0": 0, "1": 1}}, "`id2label` must give each class a name of its own"),
        ({"id2label": {"0": "a", "1": "b"}}, "hold classifier.bias as .* .4. instead of floats .2."),
        ({"hidden_act": "relu"}, "`hidden_act` must be one of gelu, gelu_new"),
    ],
)  # fmt: skip
def test_what_ours_has_not_is_refused_by_field(changed, message, tmp_path):
    model = CLASSIFIERS["bert-classes"]
    with pytest.raises(CheckpointError, match=message):
        HFReader(bert_folder(tmp_path, model, config_for(model, **changed)))


def test_two_classes_need_no_names(tmp_path):
    """transformers does not write its default names."""
    model = CLASSIFIERS["bert-tanh"]
    config = config_for(model, problem_type=None)
    del config["id2label"], config["label2id"]
    with HFReader(bert_folder(tmp_path, model, config)) as reader:
        assert (reader.description.model.num_classes, reader.description.labels) == (2, ())


def test_a_trained_checkpoint_is_exported_with_the_names_of_its_classes(tmp_path, capsys):
    model = CLASSIFIERS["megatron-classes"]
    weights, sections = random_weights(model).tensors, {"model": model.model_dump(mode="json")}
    named = {"config": {**sections, "finetune": {"labels": NAMES}}}
    run = save_as_trained(tmp_path / "run", model, TokenizerConfig(), weights, **named)
    assert main_to_hf([str(run), str(tmp_path / "out"), "--no-tokenizer"]) == 0
    assert "AutoModelForSequenceClassification.from_pretrained" in capsys.readouterr().out
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["id2label"] == {"0": "no", "1": "never mind", "2": "\u0434\u0430", "3": "LABEL_0"}
    assert config["problem_type"] == "single_label_classification"
    assert main_from_hf([str(tmp_path / "out"), str(tmp_path / "back")]) == 0
    said = capsys.readouterr().out
    assert "classes: 'no', 'never mind', '\u0434\u0430', 'LABEL_0'" in said
    how = f"--pretrained-checkpoint {tmp_path / 'back'}` and the flags of task, data, length and optimizer"
    assert how in said
    with pytest.raises(ConfigError, match="`--approximate-gelu` must be given for a model with two forms"):
        convert_to_hf(tmp_path / "run", tmp_path / "approximate", approximations=[ONE_GELU])
    named["config"]["finetune"] = {"labels": NAMES[:3]}
    run = save_as_trained(tmp_path / "damaged", model, TokenizerConfig(), weights, **named)
    with pytest.raises(CheckpointError, match="names 3, and `num_classes` is 4"):
        convert_to_hf(run, tmp_path / "never")


@pytest.mark.parametrize("name", ["megatron-classes", "bert-no-types"])
def test_the_flags_that_are_printed_make_the_model(name, tmp_path):
    model = CLASSIFIERS[name]
    write_folder(tmp_path / "hf", config_for(model), their_tensors(model) | (
        {} if model.has_token_types else {TYPES_TABLE: torch.zeros(2, 42)}))  # fmt: skip
    found = convert_from_hf(tmp_path / "hf", tmp_path / "run").description.model
    flags = [word for line in model_flags(found) for word in line.split()]
    flags += ["--micro-batch-size", "1", "--lr", "1e-3", "--tokenizer-type", "ByteLevelTokenizer"]
    rest = "--task classification --text-columns a --train-data a.tsv"
    assert parse_config([*flags, *rest.split()]).config.model == found
