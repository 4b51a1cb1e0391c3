"""Fine-tuning from files to predictions: on any layout, in one go or several, from any pretrained model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megazero.checkpoint.folder import latest_iteration, saved_iterations
from megazero.checkpoint.reader import CheckpointReader
from megazero.config.resolve import parse_config
from megazero.config.steps import Progress
from megazero.config.training_plan import training_plan_of
from megazero.errors import CheckpointError, ConfigError, DataError
from megazero.mpu.context import solo_context
from megazero.mpu.launch import Launch
from megazero.train.build import build_engine
from megazero.train.parts.chunks import build_chunks
from megazero.train.parts.vocabulary import Vocabulary, build_vocabulary
from megazero.train.pretraining import pretrain
from megazero.train.resume.saved import SavedModel
from megazero.train.resume.snapshot import Snapshots
from megazero.train.resume.trained import load_for_inference
from megazero.train.step.state import TrainState
from tests.layouts.layout import Layout
from tests.train.finetuning.samples import FAMILIES, MODEL, make_files, run, steps


@pytest.fixture
def files(tmp_path: Path) -> Path:
    return make_files(tmp_path)


def predictions(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    path = folder / f"iter_{latest_iteration(folder):07d}"
    return {f"{p.stem}/{k}": v for p in sorted(path.glob("*.safetensors")) for k, v in load_file(p).items()}


@pytest.mark.parametrize(
    ("family", "task", "ranks", "flags"),
    [
        ("bert", "pairs", 2, ""),
        ("bert", "pairs", 4, "--tensor-model-parallel-size 2 --sequence-parallel --zero-stage 3"),
        ("gpt", "pairs", 4, "--pipeline-model-parallel-size 2 --zero-stage 2"),
        ("bert", "choices", 4, "--micro-batch-size 1 --zero-stage 1"),
        (
            "gpt",
            "choices",
            2,
            "--pipeline-model-parallel-size 2 --pipeline-schedule zb-v --num-layers 4 --micro-batch-size 1",
        ),
    ],
)
def test_every_layout_finds_the_same(files, family, task, ranks, flags):
    """Even where the last batch of an evaluation is short: 16, 11 and 9 samples in batches of 8."""
    layers = ["--num-layers", 4] if "--num-layers 4" in flags else []
    both = ("--epochs", 1, "--predictions", files / "p.jsonl")
    alone = run(files, family, task, *both, *layers)
    one, expected = steps(files), predictions(files / "p.jsonl")
    found = run(files, family, task, *both, *flags.split(), ranks=ranks)
    for want, got in zip(one, steps(files), strict=True):
        assert got == pytest.approx(want, rel=1e-4)
    assert [each["split"] for each in found] == ["validation", "test"]
    for want, got in zip(alone, found, strict=True):
        assert got["task_loss"] == (want["task_loss"] and pytest.approx(want["task_loss"], rel=1e-5))
        for key in ("iteration", "samples", "accuracy", "confusion", "f1", "files", "num_tokens"):
            assert got[key] == want[key], key
    told = predictions(files / "p.jsonl")
    assert len(told) == 9
    for a, b in zip(expected, told, strict=True):
        assert b.pop("probabilities") == pytest.approx(a.pop("probabilities"), abs=1e-5)
        assert a == b


def test_an_epoch_is_all_samples_and_its_last_batch_is_short(files):
    found = run(files, "bert", "pairs", "--epochs", 2)
    assert [each["iteration"] for each in found] == [3, 6, 6]
    assert [each["samples"] for each in found] == [16, 16, 0]
    assert found[2]["task_loss"] is None
    assert {path.rpartition("/")[2]: each["samples"] for path, each in found[0]["files"].items()} == {
        "valid.tsv": 11,
        "more.tsv": 5,
    }
    accuracies = [line[3] for line in steps(files)]
    assert [round(a * n, 9) % 1 for a, n in zip(accuracies, (8, 8, 3, 8, 8, 3), strict=True)] == [0] * 6


@pytest.mark.parametrize(("family", "task"), [("bert", "pairs"), ("gpt", "choices")])
def test_a_run_that_stops_within_an_epoch_goes_on_bit_for_bit(files, family, task):
    both = ("--epochs", 2, "--predictions", files / "p.jsonl")
    straight = run(files, family, task, *both, "--save", files / "a")
    whole, told = steps(files), predictions(files / "p.jsonl")
    (files / "p.jsonl").unlink()
    parts = (*both, "--save", files / "b", "--load", files / "b", "--metrics-jsonl", files / "b.jsonl")
    run(files, family, task, *parts, "--exit-interval", 4)
    assert latest_iteration(files / "b") == 4
    assert not (files / "p.jsonl").exists()
    resumed = run(files, family, task, *parts)
    assert steps(files, "b.jsonl") == whole
    drop = ("seconds",)
    assert [{k: v for k, v in each.items() if k not in drop} for each in resumed] == [
        {k: v for k, v in each.items() if k not in drop} for each in straight
    ]
    assert predictions(files / "p.jsonl") == told
    for place in ("", "best"):
        a, b = tensors(files / "a" / place), tensors(files / "b" / place)
        assert a.keys() == b.keys()
        assert all(torch.equal(a[k], b[k]) for k in a), place


def test_an_older_multiple_choice_checkpoint_keeps_its_bias(files):
    """It was written before `classifier_bias` was a setting; for a day, its bias fitted no model."""
    run(files, "gpt", "choices", "--epochs", 1, "--save", files / "s")
    facts = json.loads((files / "s/iter_0000003/state.json").read_text())
    assert facts["config"]["model"].pop("classifier_bias") is True
    older = SavedModel(facts["vocab_size"], facts["config"], files / "state.json").settings
    names = {name.partition("/")[2] for name in tensors(files / "s") if "classifier" in name}
    assert {"classifier.weight", "classifier.bias"} <= names
    for bias in (True, False):
        model = older if bias else older.model_copy(update={"classifier_bias": False})
        config = Layout().config().model_copy(update={"model": model})
        vocabulary, context = Vocabulary(facts["vocab_size"], 384, None, None), solo_context()
        (chunk,) = build_chunks(config, vocabulary, context, context.device).values()
        assert ("head.classifier.bias" in dict(chunk.named_parameters())) == bias


@pytest.mark.fast
def test_the_best_epoch_is_kept_and_examined(files):
    found = run(files, "bert", "pairs", "--epochs", 4, "--lr", 2e-2, "--save", files / "s", "--predictions",
                files / "p.jsonl")  # fmt: skip
    accuracies = {each["iteration"]: each["accuracy"] for each in found if each["split"] == "validation"}
    best = next(iteration for iteration, a in accuracies.items() if a == max(accuracies.values()))
    assert best < 12, "the last epoch is not meant to be the best here"
    assert saved_iterations(files / "s" / "best") == [best]
    assert saved_iterations(files / "s") == [12]
    told = predictions(files / "p.jsonl")
    again = ("--epochs", 0, "--pretrained-checkpoint", files / "s" / "best")
    evaluated = run(files, "bert", "pairs", *again, "--predictions", files / "q.jsonl")
    assert evaluated[0]["accuracy"] == accuracies[best]
    assert predictions(files / "q.jsonl") == told
    assert {(row["file"].rpartition("/")[2], row["id"], row["label"]) for row in told} == {
        ("test.tsv", f"test{i}", None) for i in range(9)
    }
    assert set(told[0]["probabilities"]) == {"high", "low", "mid"}


@pytest.mark.parametrize(
    ("family", "metrics", "best"),
    [
        ("bert", ("loss", "loss"), 6),  # a run that forgot it at its resume would keep 12
        ("bert", ("accuracy", "loss"), 3),  # the first of equal ones; by its loss, the later two are worse
        ("gpt", ("macro_f1",), 12),  # accuracy would keep 6
    ],
)
def test_the_best_epoch_is_that_of_the_chosen_figure_and_outlives_a_resume(
    files, capsys, family, metrics, best
):
    for part, metric in enumerate(metrics, 1):
        stop = ("--exit-interval", 7) if part < len(metrics) else ()
        found = run(files, family, "pairs", "--epochs", 4, "--lr", 2e-2, "--save", files / "s", "--load",
                    files / "s", "--save-interval", 100, "--best-metric", metric, *stop)  # fmt: skip
    assert saved_iterations(files / "s" / "best") == [best]
    evaluated = next(each for each in found if each["iteration"] == best)
    facts = CheckpointReader(files / "s" / "best" / f"iter_{best:07d}").facts
    figures = ("accuracy", "macro_f1", "task_loss")
    assert [facts[key] for key in ("accuracy", "macro_f1", "loss")] == [evaluated[key] for key in figures]
    assert facts["best_metric"] == metrics[0]
    value = evaluated["task_loss" if metrics[-1] == "loss" else metrics[-1]]
    words = {"loss": "loss", "macro_f1": "macro F1"}[metrics[-1]]
    said = capsys.readouterr().out
    assert f"the best model is that of iteration {best}: {words} {value:.4f}\n" in said
    one_answer = "warning: the best model so far answers 'low' to each of 16 samples, whatever their text"
    assert one_answer in said, "where accuracy is 0.5625, all answers are `low`"
    assert ("or choose by --best-metric macro_f1" in said) == (family == "bert")


def test_predictions_are_of_validation_samples_without_test_data_and_tsv_by_default(files):
    path, valid = files / "p.tsv", files / "more.tsv"
    words = ["--task", "classification", "--text-columns", "a", "--id-column", "name", "--epochs", "1"]
    run(files, "bert", "train only", *words, "--valid-data", valid, "--predictions", path)
    lines = [line.split("\t") for line in path.read_text().splitlines()]
    assert lines[0] == ["file", "id", "label", "predicted", "p(high)", "p(low)", "p(mid)"]
    known = [line.split("\t") for line in valid.read_text().splitlines()][1:]
    assert [line[:3] for line in lines[1:]] == [[str(valid), row[0], row[6]] for row in known]
    for line in lines[1:]:
        shares = dict(zip(("high", "low", "mid"), map(float, line[4:]), strict=True))
        assert shares[line[3]] == max(shares.values())


def pretrained(files: Path, family: str, *flags: str) -> Path:
    """The checkpoint of a pretraining that has made no step."""
    words = f"{MODEL} {FAMILIES[family]} --mock-data --train-iters 9".format(folder=files).split()
    config = parse_config([*words, "--save", str(files / family), *flags], world_size=1).config
    context, vocabulary, training_plan = solo_context(), build_vocabulary(config), training_plan_of(config, 1)
    engine = build_engine(config, training_plan, build_chunks(config, vocabulary, context), context)
    snapshots = Snapshots(config, training_plan, engine, context, vocabulary.size, 1234)
    snapshots.save(TrainState(Progress(1, 8, 128)))
    snapshots.saver.close()
    return files / family


@pytest.mark.parametrize(
    ("flags", "fresh", "left"),
    [
        ((), {"classifier"}, {"head", "binary_head"}),
        (("--bert-no-binary-head",), {"classifier", "pooler"}, {"head"}),
    ],
)
def test_a_pretrained_model_gives_its_trunk(files, capsys, flags, fresh, left):
    folder = pretrained(files, "bert", *flags)
    small = ("--epochs", 1, "--lr", 1e-12, "--seed", 5)
    run(files, "bert", "pairs", *flags, *small, "--pretrained-checkpoint", folder, "--save", files / "s")
    said = capsys.readouterr().out.splitlines()
    named = {line.partition(": ")[0]: line.partition(": ")[2].split(", ") for line in said if ": " in line}
    assert {name.split(".")[0] for name in named["initialized anew"]} == fresh
    assert {name.split(".")[0] for name in named["left over there"]} == left
    before, after = tensors(folder), tensors(files / "s" / "best")
    taken = [name for name in after if name in before]
    assert ("pooler.weight" in "".join(taken)) == ("pooler" not in fresh)
    for name in taken:
        assert torch.allclose(before[name], after[name], atol=1e-6), name


def test_a_classifier_generates_no_text(files):
    run(files, "gpt", "pairs", "--epochs", 1, "--save", files / "s")
    with pytest.raises(
        ConfigError, match="must hold a model for `megazero generate`, but .* holds a classifier"
    ):
        load_for_inference(str(files / "s"), Launch())


def test_a_causal_model_is_fine_tuned_too_and_from_there_for_other_labels(files, capsys):
    folder = pretrained(files, "gpt")
    run(files, "gpt", "pairs", "--epochs", 1, "--pretrained-checkpoint", folder, "--save", files / "s")
    assert "left over" not in capsys.readouterr().out, "a tied head has no weight of its own"
    other = ("--epochs", 1, "--labels", "mid", "low", "high", "--pretrained-checkpoint", files / "s")
    run(files, "gpt", "pairs", *other)
    said = capsys.readouterr().out
    assert "initialized anew: classifier.bias, classifier.weight" in said
    assert "left over there: classifier.bias, classifier.weight" in said


@pytest.mark.parametrize(
    ("error", "flags", "says"),
    [
        (ConfigError, "--num-classes 5", "`num_classes` must be 3 for these labels, but is 5"),
        (DataError, "--labels low high", "`label` must be one of low, high, but is 'mid' in sample"),
        (DataError, "--label-column gold", "`gold` must be a column of"),
        (DataError, "--valid-data {folder}/none.tsv", "but is missing; check the path"),
        (DataError, "--predictions {folder}", "but is .*: it is a folder"),
        (DataError, "--predictions {folder}/vocab.txt/p.tsv", "cannot be written to"),
        (DataError, "--valid-data {folder}/test.tsv", "`label` must be a column of"),
        (CheckpointError, "--epochs 0", "must name a fine-tuned model"),
        (ConfigError, "--epochs 0 --train-data {folder}/none.tsv", "`labels` must be known"),
        (CheckpointError, "--pretrained-checkpoint {folder}", "must hold a checkpoint, but has none"),
    ],
)
def test_bad_input_gets_a_sentence_and_writes_nothing(files, error, flags, says):
    before = sorted(files.rglob("*"))
    if error is CheckpointError and flags == "--epochs 0":
        flags += " --labels low mid high"
    with pytest.raises(error, match=says):
        run(files, "bert", "pairs", "--save", files / "s", *flags.format(folder=files).split())
    assert sorted(files.rglob("*")) == before


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--hidden-size 64", "must hold this model, but has hidden_size 32 .now 64."),
        ("--num-layers 1", "num_layers 2 .now 1."),
        ("--bert-no-binary-head", "bert_binary_head True .now False."),
        ("--epochs 0 --labels low mid high", "must hold a classifier for these labels to be evaluated"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(files, flags, says):
    folder = pretrained(files, "bert")
    with pytest.raises(CheckpointError, match=says):
        run(files, "bert", "pairs", "--pretrained-checkpoint", folder, *flags.split())


def test_another_batch_within_an_epoch_is_refused(files):
    both = ("--epochs", 3, "--save", files / "b", "--load", files / "b")
    run(files, "bert", "pairs", *both, "--exit-interval", 4)
    with pytest.raises(CheckpointError, match="must stay 8 until the last epoch, but is 4; set it"):
        run(files, "bert", "pairs", *both, "--global-batch-size", 4, "--override-opt_param-scheduler")


def test_a_fine_tuning_is_no_pretraining(files):
    words = f"{MODEL} {FAMILIES['gpt']} --task SST-2 --train-data x".split()
    with pytest.raises(
        ConfigError, match="must be left out of pretraining, but is SST-2; run `megazero finetune`"
    ):
        pretrain(parse_config(words, world_size=1).config, Launch())
