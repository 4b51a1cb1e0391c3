"""A fine-tuned classifier through transformers' folder: the same answers there, and here again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megazero.errors import CheckpointError, ConfigError
from megazero.formats.hf.convert import convert_from_hf, convert_to_hf
from tests.train.finetuning.samples import make_files, run
from tests.train.finetuning.test_run import pretrained


def predictions(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def texts(folder: Path, split: str = "test") -> list[dict[str, str]]:
    """The pairs of a file."""
    rows = [line.split("\t") for line in (folder / f"{split}.tsv").read_text().splitlines()[1:]]
    return [{"text": row[1], "text_pair": row[2]} for row in rows]


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        (1, "--apply-residual-connection-post-layernorm"),
        (4, "--tensor-model-parallel-size 2 --sequence-parallel --zero-stage 3"),
        (4, "--pipeline-model-parallel-size 2 --zero-stage 2 --apply-residual-connection-post-layernorm"),
    ],
)
def test_a_fine_tuned_model_answers_the_same_as_a_folder_of_transformers(ranks, flags, tmp_path):
    files, norm = make_files(tmp_path), [flag for flag in flags.split() if "residual" in flag]
    common = ("--epochs", 2, "--predictions", files / "p.jsonl", "--save", files / "s")
    run(files, "bert", "pairs", *flags.split(), *common, ranks=ranks)
    expected = predictions(files / "p.jsonl")
    convert_to_hf(files / "s" / "best", files / "out")
    convert_from_hf(files / "out", files / "back")
    for source in (("--load-hf", files / "out"), ("--pretrained-checkpoint", files / "back")):
        again = ("--epochs", 0, "--predictions", files / "q.jsonl", *source)
        run(files, "bert", "pairs", *norm, *again)
        for want, got in zip(expected, predictions(files / "q.jsonl"), strict=True):
            assert got["probabilities"] == pytest.approx(want["probabilities"], abs=1e-5)
            assert got["predicted"] == want["predicted"]
    transformers = pytest.importorskip("transformers")
    classify = transformers.pipeline("text-classification", str(files / "out"), device="cpu", top_k=None)
    assert len(expected) == 9
    for told, want in zip(classify(texts(files), batch_size=4), expected, strict=True):
        found = {each["label"]: each["score"] for each in told}
        assert found == pytest.approx(want["probabilities"], abs=1e-5)
        assert len(found) == 3


def test_choices_come_back_too_with_their_names_or_without(tmp_path):
    files = make_files(tmp_path)
    run(files, "bert", "choices", "--epochs", 1, "--predictions", files / "p.jsonl", "--save", files / "s")
    exported, _ = convert_to_hf(files / "s", files / "out")
    assert exported.architecture == "MegatronBertForMultipleChoice"
    again = ("--epochs", 0, "--load-hf", files / "out", "--predictions", files / "q.jsonl")
    run(files, "bert", "choices", *again)
    assert predictions(files / "q.jsonl") == predictions(files / "p.jsonl")
    config = json.loads((files / "out" / "config.json").read_text())
    del config["id2label"], config["label2id"]
    (files / "out" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="`labels` must be known"):
        run(files, "bert", "choices", *again)
    run(files, "bert", "choices", *again, "--labels", "x", "y", "z")
    assert predictions(files / "q.jsonl") == predictions(files / "p.jsonl")


def test_a_model_of_transformers_for_other_labels_gives_its_trunk(tmp_path, capsys):
    files = make_files(tmp_path)
    run(files, "bert", "pairs", "--epochs", 1, "--save", files / "s")
    convert_to_hf(files / "s", files / "out")
    other = ("--labels", "mid", "low", "high", "--load-hf", files / "out")
    run(files, "bert", "pairs", *other, "--epochs", 1)
    said = capsys.readouterr().out
    assert "initialized anew: classifier.bias, classifier.weight" in said
    assert "left over there: classifier.bias, classifier.weight" in said
    with pytest.raises(CheckpointError, match="must hold a classifier for these labels to be evaluated"):
        run(files, "bert", "pairs", *other, "--epochs", 0)
    with pytest.raises(CheckpointError, match="`hidden_size` is 32, not 64"):
        run(files, "bert", "pairs", *other, "--epochs", 1, "--hidden-size", 64)


@pytest.mark.parametrize("flags", [(), ("--bert-no-binary-head", "--bert-token-types")])
def test_a_pretrained_model_of_transformers_gives_the_same_start_as_its_checkpoint(flags, tmp_path):
    files = make_files(tmp_path)
    folder = pretrained(files, "bert", "--no-bias-gelu-fusion", *flags)
    convert_to_hf(folder, files / "out")
    common = ("--no-bias-gelu-fusion", *flags, "--epochs", 1, "--predictions", files / "p.jsonl")
    run(files, "bert", "pairs", *common, "--pretrained-checkpoint", folder)
    expected = predictions(files / "p.jsonl")
    run(files, "bert", "pairs", *common, "--load-hf", files / "out")
    assert predictions(files / "p.jsonl") == expected
