"""Reward models from files: trained, resumed, written for transformers, read again, and scoring files."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megazero.commands.score import build_parser, config_of
from megazero.errors import CheckpointError, ConfigError, DataError
from megazero.formats.hf.convert import convert_to_hf
from megazero.mpu.context import solo_context, thread_context
from megazero.mpu.launch import grid_of
from megazero.mpu.thread_group import ThreadWorld
from megazero.post_training.score import read_lines, score_on
from tests.post_training import samples
from tests.post_training.samples import LENGTH, make_files, run, write

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A folder with files, a run of a reward model in `run`, and its folder for transformers in `hf`."""
    folder = make_files(tmp_path_factory.mktemp("reward"))
    steps, evaluations = run(
        folder, "reward", "--epochs", 12, "--save", folder / "run", "--save-hf", folder / "hf", ranks=1
    )
    (folder / "steps.json").write_text(json.dumps([steps, evaluations]))
    return folder


def test_it_learns_which_answers_are_chosen(trained):
    steps, evaluations = json.loads((trained / "steps.json").read_text())
    assert steps[0]["reward_loss"] > 2 * steps[-1]["reward_loss"]
    assert steps[-1]["accuracy"] == 1.0
    assert steps[-1]["reward_chosen"] > steps[-1]["reward_rejected"]
    assert len(evaluations) == 12
    assert evaluations[-1]["accuracy"] >= 0.6
    assert evaluations[-1]["reward_loss"] < evaluations[0]["reward_loss"]


def test_the_folder_is_the_converted_checkpoint_bit_for_bit(trained, tmp_path):
    convert_to_hf(trained / "run", tmp_path / "converted")
    ours, theirs = trained / "hf", tmp_path / "converted"
    names = {path.name for path in theirs.iterdir()}
    assert {path.name for path in ours.iterdir()} == {*names, "megazero_weights.json"}
    for name in names:
        assert (ours / name).read_bytes() == (theirs / name).read_bytes(), name
    assert load_file(ours / "model.safetensors")["score.weight"].shape == (1, 32)


def scores(folder: Path, checkpoint: Path, data: Path, *flags: object, ranks: int = 1) -> list[dict]:
    """What `megazero score` writes of a file, on ranks as threads."""
    out = folder / "scores.jsonl"
    given = build_parser().parse_args([str(checkpoint), "--data", str(data), "--out", str(out)])
    argv = ["--tokenizer-type", "HFTokenizer", "--tokenizer-model", str(folder), "--seq-length", str(LENGTH)]
    per_token = "--per-token" in flags
    argv += [str(flag) for flag in flags if flag != "--per-token"]
    config = config_of(given, argv, world_size=ranks)
    lines = read_lines(config)
    if ranks == 1:
        score_on(config, solo_context(), lines, str(out), per_token=per_token)
    else:
        world, grid = ThreadWorld(ranks), grid_of(config.parallel, ranks)

        def work(rank: int) -> None:
            score_on(config, thread_context(world, grid, rank), lines, str(out), per_token=per_token)

        world.run(work)
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_transformers_gives_the_scores_that_score_writes(trained):
    from transformers import AutoModelForSequenceClassification

    from megazero.post_training.files import read_splits

    model = AutoModelForSequenceClassification.from_pretrained(trained / "hf").eval()
    assert type(model).__name__ == "LlamaForSequenceClassification"
    config = samples.config_of(trained, "reward")
    pairs = read_splits(config)[0].valid.pairs
    rows = [pairs.ids[a:b] for a, b in zip(pairs.offsets[:-1], pairs.offsets[1:], strict=True)]
    with torch.no_grad():
        theirs = [model(torch.from_numpy(row.astype("int64"))[None]).logits.item() for row in rows]
    for checkpoint in (trained / "hf", trained / "run"):
        ours = scores(trained, checkpoint, trained / "valid.jsonl")
        flat = [value for line in ours for value in (line["chosen"], line["rejected"])]
        assert flat == pytest.approx(theirs, abs=1e-5)


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
        (2, "--context-parallel-size 2"),
        (2, "--zero-stage 3 --micro-batch-size 2"),
        pytest.param(4, "--pipeline-model-parallel-size 2 --context-parallel-size 2", marks=pytest.mark.slow),
        pytest.param(4, "--tensor-model-parallel-size 2 --zero-stage 2", marks=pytest.mark.slow),
    ],
)
def test_scores_are_the_same_on_every_layout(ranks, flags, trained, tmp_path):
    data = write(
        tmp_path / "mixed.jsonl",
        [
            {"messages": samples.turns("What is", "Rome", "and", "Paris ?")},
            *map(json.loads, (trained / "valid.jsonl").read_text().splitlines()),
        ],
    )
    rewards = scores(trained, trained / "run", data)
    assert [list(line) for line in rewards] == [["score"], *[["chosen", "rejected"]] * 5]
    for line, other in zip(
        rewards, scores(trained, trained / "run", data, *flags.split(), ranks=ranks), strict=True
    ):
        assert other == pytest.approx(line, abs=1e-5)


@pytest.fixture(scope="module")
def words(tmp_path_factory) -> Path:
    """A folder with files and a run of a model of words in `run`."""
    folder = make_files(tmp_path_factory.mktemp("words"))
    run(folder, "chat", "--epochs", 1, "--save", folder / "run", "--save-hf", folder / "hf")
    return folder


def test_log_probabilities_are_transformers_of_answers_alone(words):
    from transformers import AutoModelForCausalLM

    from megazero.post_training.files import read_splits

    model = AutoModelForCausalLM.from_pretrained(words / "hf").eval()
    pairs = read_splits(samples.config_of(words, "reward"))[0].valid.pairs
    ours = scores(words, words / "run", words / "valid.jsonl", "--per-token")
    flat = [(line[name], line[f"{name}_tokens"]) for line in ours for name in ("chosen", "rejected")]
    for row, (total, tokens) in enumerate(flat):
        ids = torch.from_numpy(pairs.ids[pairs.offsets[row] : pairs.offsets[row + 1]].astype("int64"))
        with torch.no_grad():
            logs = model(ids[None]).logits[0].double().log_softmax(-1)
        wanted = logs[:-1].gather(1, ids[1:, None])[:, 0][pairs.answers[row] - 1 :]
        assert tokens == pytest.approx(wanted.tolist(), abs=1e-5)
        assert total == pytest.approx(wanted.sum().item(), abs=1e-4)
    for flags in ("--context-parallel-size 2", "--pipeline-model-parallel-size 2"):
        again = scores(words, words / "hf", words / "valid.jsonl", "--per-token", *flags.split(), ranks=2)
        assert [line["chosen_tokens"] for line in again] == [
            pytest.approx(line["chosen_tokens"], abs=1e-5) for line in ours
        ]


def test_a_reward_model_begins_from_one_and_from_words(trained, words):
    steps, _ = run(trained, "reward", "--epochs", 1, "--load-hf", trained / "hf", "--lr", "1e-9")
    assert steps[0]["accuracy"] == 1.0
    steps, _ = run(trained, "reward", "--epochs", 1, "--load-hf", words / "hf", "--lr", "1e-9")
    assert steps[0]["reward_loss"] == pytest.approx(0.69, abs=0.3)


def test_bad_input_is_refused_in_one_sentence(trained, words, tmp_path):
    with pytest.raises(ConfigError, match="per_token` must be left out|--per-token` must be left out"):
        config_of(
            build_parser().parse_args(
                [str(trained / "hf"), "--data", "x", "--out", str(tmp_path / "o"), "--per-token"]
            ),
            [],
        )
    with pytest.raises(CheckpointError, match=r"`CKPT` must hold a model"):
        config_of(build_parser().parse_args([str(tmp_path), "--data", "x", "--out", str(tmp_path / "o")]), [])
    with pytest.raises(DataError, match=r"`margin` must be left out of pairs with --reward-loss per_token"):
        run(trained, "reward", "--reward-loss", "per_token", "--epochs", 1)
    long = write(tmp_path / "long.jsonl", [{"messages": samples.turns("What", "Rome " * LENGTH)}])
    with pytest.raises(DataError, match=rf"line 1: its answer must end within {LENGTH} tokens, but ends at"):
        scores(trained, trained / "run", long)
    with pytest.raises(DataError, match="`data` must hold a conversation or more"):
        scores(trained, trained / "run", write(tmp_path / "empty.jsonl", []))
    assert not os.path.lexists(tmp_path / "o")
