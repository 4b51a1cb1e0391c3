"""Chats and preferences from files to a trained model: on any layout, in one go or several."""

from __future__ import annotations

import io
import math
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from megazero.checkpoint.folder import latest_iteration
from megazero.checkpoint.part import WEIGHT, Part
from megazero.checkpoint.reader import CheckpointReader
from megazero.errors import CheckpointError, ConfigError, DataError
from megazero.post_training.run import read_task
from tests.formats.hf.test_push import free_port
from tests.post_training.samples import LENGTH, MODEL, STEP, TASKS, config_of, make_files, run, turns, write
from tests.source_tree import ROOT
from tests.tables import over_table

SHOWN = (
    *(
        "lm_loss",
        "preference_loss",
        "sft_loss",
        "reward_loss",
        "rewards_margins",
        "accuracy",
        "reward_chosen",
    ),
    *("grad_norm", "learning_rate"),
)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    return make_files(tmp_path)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """The weights of the newest checkpoint."""
    reader = CheckpointReader(folder / f"iter_{latest_iteration(folder):07d}")
    parts = [Part.whole(k, torch.empty(shape)) for k, shape in reader.shapes.items() if k.kind == WEIGHT]
    reader.read(parts)
    return {str(part.key): part.tensor for part in parts}


def figures(records: list[dict]) -> list[dict[str, float]]:
    return [{key: record[key] for key in SHOWN if key in record} for record in records]


def scored(files: Path) -> dict[str, np.ndarray]:
    """The reference's scores, by the name of the file."""
    return {path.name: np.load(path)["scores"] for path in sorted(files.glob("*.reference-*.npz"))}


@pytest.mark.parametrize(
    ("task", "ranks", "flags"),
    [
        ("preference", 2, "--context-parallel-size 2 --preference-loss ipo"),
        ("chat", 2, "--tensor-model-parallel-size 2 --sequence-parallel --micro-batch-size 2"),
        (
            "preference",
            2,
            "--pipeline-model-parallel-size 2 --pipeline-schedule zb-h1 --preference-sft-coeff 0.3",
        ),
        ("chat", 4, "--pipeline-model-parallel-size 2 --context-parallel-size 2"),
        ("preference", 2, "--zero-stage 3 --preference-loss orpo"),
        (
            "preference",
            4,
            "--num-experts 4 --moe-router-topk 2 --moe-router-load-balancing-type seq_aux_loss "
            "--moe-aux-loss-coeff 0.02 --expert-model-parallel-size 2 --context-parallel-size 2",
        ),
    ],
)
def test_every_layout_trains_the_same(files, task, ranks, flags):
    """Unequal numbers of tokens in micro-batches and on ranks do not matter, nor short last batches."""
    words = flags.split()
    model = [w for i, w in enumerate(words) if "--moe" in f"{words[i - 1] if i else ''} {w}"]
    model += [w for i, w in enumerate(words) if "preference" in w or (i and "preference" in words[i - 1])]
    model += ["--num-experts", "4"] if "--num-experts" in words else []
    alone, evaluated = run(files, task, "--epochs", 1, *model)
    found, also = run(files, task, "--epochs", 1, *words, ranks=ranks)
    assert len(alone) == (3 if task == "preference" else len(alone)) > 1
    for want, got in zip([*alone, *evaluated], [*found, *also], strict=True):
        (want,), (got,) = figures([want]), figures([got])
        assert got == pytest.approx(want, rel=1e-5, abs=2e-6)


@pytest.mark.parametrize("task", ["chat", "preference", "reward"])
def test_a_run_that_stops_within_an_epoch_goes_on_bit_for_bit(files, task):
    both = ("--epochs", 2, "--hidden-dropout", 0.1)
    straight = run(files, task, *both, "--save", files / "a")
    parts = (*both, "--save", files / "b", "--load", files / "b", "--metrics-jsonl", files / "b.jsonl")
    run(files, task, *parts, "--exit-interval", 2)
    assert latest_iteration(files / "b") == 2
    resumed = run(files, task, *parts)
    assert [figures(records) for records in resumed] == [figures(records) for records in straight]
    a, b = weights(files / "a"), weights(files / "b")
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_the_reference_is_the_initial_model_without_dropout_and_does_not_drift(files):
    run(files, "preference", "--epochs", 1, "--hidden-dropout", 0.4, "--attention-dropout", 0.4)
    dropping = scored(files)
    before = {name: (files / name).read_bytes() for name in dropping}
    steps, _ = run(files, "preference", "--epochs", 2)
    # The same names: neither dropout nor epochs matter; and the same bytes, although weights have moved.
    assert {name: (files / name).read_bytes() for name in scored(files)} == before
    assert math.isclose(steps[0]["preference_loss"], math.log(2), rel_tol=1e-6)
    for name in dropping:
        (files / name).unlink()
    run(files, "preference", "--epochs", 1)
    again = scored(files)
    assert again.keys() == dropping.keys()
    assert all(np.array_equal(again[name], dropping[name]) for name in again)
    run(files, "preference", "--epochs", 1, "--seed", 7)
    assert len(scored(files)) == 4  # other weights, other names


def test_a_resumed_run_needs_the_scores_that_it_began_with(files):
    parts = ("--epochs", 2, "--save", files / "s", "--load", files / "s")
    run(files, "preference", *parts, "--exit-interval", 2)
    (path,) = files.glob("pairs.jsonl.reference-*.npz")
    whole = path.read_bytes()
    path.unlink()
    with pytest.raises(CheckpointError, match=r"must hold the reference's scores.*but is gone; put it back"):
        run(files, "preference", *parts)
    path.write_bytes(whole[:-30])
    with pytest.raises(CheckpointError, match="must hold the reference's scores, but is damaged"):
        run(files, "preference", *parts)
    arrays = dict(np.load(io.BytesIO(whole)))
    np.savez(path, scores=arrays["scores"], lengths=arrays["lengths"] + 1)
    with pytest.raises(CheckpointError, match="must hold scores of these answers, but .* other lengths"):
        run(files, "preference", *parts)
    path.write_bytes(whole)
    lines = (files / "pairs.jsonl").read_text().splitlines(keepends=True)
    (files / "pairs.jsonl").write_text("".join([*lines[:-1], lines[0]]))
    with pytest.raises(DataError, match="must give the samples with which the checkpoint was trained"):
        run(files, "preference", *parts)


def test_small_rates_move_weights_of_bfloat16_as_masters_are_float32(files):
    flags = ("--epochs", 1, "--bf16", "--lr", 1e-6, "--lr-decay-style", "constant", "--save", files / "s")
    run(files, "chat", *flags, "--save-interval", 1)
    first, last = (
        CheckpointReader(files / "s" / f"iter_{i:07d}") for i in (1, latest_iteration(files / "s"))
    )
    moved = []
    for key, shape in first.shapes.items():
        if key.kind == WEIGHT:
            a, b = (Part.whole(key, torch.empty(shape)) for _ in range(2))
            first.read([a])
            last.read([b])
            moved.append(not torch.equal(a.tensor, b.tensor))
    assert all(moved)


def test_rows_without_an_answer_are_dropped_and_counted_and_long_ones_cut_off(files, capsys):
    long = turns("What is the capital of France?", "Paris.")
    rows = [
        {"messages": long},
        {"messages": turns("a " * 60, "Paris.")},  # its answer is beyond the end
        {"messages": turns("a", "Paris " * 60)},
        {"messages": [{"role": "user", "content": "Hi"}]},
    ]
    write(files / "chats.jsonl", rows)
    samples = read_task(config_of(files, "only chat", "--epochs", 1)).splits
    assert samples.remarks == (
        f"train_data: 2 conversations are cut off at {LENGTH} tokens",
        "train_data: 2 conversations are left out, as no token of them counts",
        f"train_data: 2 conversations in 2 rows, {samples.train.padding_share:.1%} padding",
    )
    batch = samples.train.batch([0, 1, -1])
    assert batch["loss_mask"][2].sum() == 0
    assert (batch["document_ids"][2] == -1).all()
    counted = batch["loss_mask"] > 0
    tokens = np.concatenate([batch["tokens"], np.zeros((3, 1), int)], axis=1)[:, 1:]
    assert (batch["labels"][counted] == tokens[counted]).all()
    write(files / "chats.jsonl", rows[1:2])
    with pytest.raises(DataError, match="`train_data` must hold an answer that counts within 48 tokens"):
        read_task(config_of(files, "only chat", "--epochs", 1))


@over_table(
    ("task", "flags", "what"),
    [
        ("chat", "--model-family bert", "`family` must be gpt with `task` chat"),
        ("chat", "--model-family t5", "`family` must be gpt with `task` chat"),
        ("chat", "--preference-loss ipo", "`task` must be preference with `preference_loss` ipo"),
        ("chat", "--label-column x", "`task` must be classification, multiple-choice"),
        ("chat", "--test-data x", "`task` must be classification, multiple-choice"),
        ("chat", "--mtp-num-layers 1", "`task` must be left out with `mtp_num_layers`"),
        ("chat", "--data-path x", "`task` must be left out with `data_path`"),
        (
            "preference",
            "--z-loss-coeff 0.1",
            "`task` must be left out or `task` must be chat with `z_loss_coeff`",
        ),
        ("preference", "--recompute-logits", "`task` must be left out or `task` must be chat with `logits`"),
        ("preference", "--kd --load-teacher x", "`task` must be left out with `kd`"),
        ("preference", "--preference-label-smoothing 0.1", "`preference_loss` must be robust"),
        ("preference", "--simpo-gamma 1", "`preference_loss` must be simpo with `simpo_gamma`"),
        ("preference", "--preference-loss orpo --preference-sft-coeff 1", "orpo has that term already"),
        (
            "preference",
            "--num-experts 4 --moe-input-jitter-eps 0.1",
            "routers must be without noise for a preference loss with a reference",
        ),
        ("chat", "--tokenizer-type NullTokenizer --vocab-size 9", "must be HFTokenizer with `task` chat"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_sentence(task, flags, what, tmp_path_factory):
    folder = tmp_path_factory.mktemp("refused")
    with pytest.raises(ConfigError) as caught:
        config_of(folder, task, *flags.split())
    assert what in str(caught.value), str(caught.value)


@pytest.mark.parametrize("task", ["chat", "preference", "reward"])
def test_a_file_that_is_missing_or_empty_is_named(files, task):
    path = files / ("chats.jsonl" if task == "chat" else "pairs.jsonl")
    path.write_text("")
    with pytest.raises(DataError, match="must hold an answer that counts|but in one there is none"):
        read_task(config_of(files, task, "--epochs", 1))
    path.unlink()
    with pytest.raises(DataError, match=f"`{path}` must be a file .* but is missing; check the path"):
        read_task(config_of(files, task, "--epochs", 1))


def test_a_line_that_is_no_conversation_is_named(files):
    with (files / "chats.jsonl").open("a") as file:
        file.write('{"messages": "Hi"}\n')
    with pytest.raises(
        DataError, match=r"chats.jsonl, line 16: `messages` must be a list .*correct the line"
    ):
        run(files, "only chat", "--epochs", 1)


@pytest.mark.slow
def test_weights_of_a_checkpoint_begin_another_task(files, capsys):
    run(files, "chat", "--epochs", 1, "--save", files / "chat")
    begin = ("--pretrained-checkpoint", files / "chat", "--hidden-dropout", 0, "--attention-dropout", 0)
    steps, _ = run(files, "preference", "--epochs", 1, *begin, "--save", files / "dpo")
    assert "took the weights from" in capsys.readouterr().out
    assert math.isclose(steps[0]["preference_loss"], math.log(2), rel_tol=1e-6)
    _, evaluated = run(files, "preference", "--epochs", 0, *begin)
    assert evaluated[-1]["preference_loss"] == pytest.approx(math.log(2))
    with pytest.raises(CheckpointError, match="must hold a training on preferences with a reference"):
        run(files, "preference", "--epochs", 1, "--load", files / "chat")


@pytest.mark.slow
@pytest.mark.parametrize("task", ["chat", "preference", "reward"])
def test_two_ranks_that_are_killed_end_as_those_that_were_not(files, task):
    """At five moments drawn over the time of a whole run, within scoring, steps and saving too."""
    line = f"{MODEL} {STEP} {TASKS[task]} --epochs 2 --save-interval 1 --zero-stage 2".format(folder=files)
    dice = random.Random(task)

    def started(folder: Path) -> list[subprocess.Popen]:
        words = [*line.split(), "--save", str(folder), "--load", str(folder)]
        shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        shared |= {"LOCAL_WORLD_SIZE": "2", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        return [
            subprocess.Popen(
                [sys.executable, str(ROOT / "finetune.py"), *words],
                env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.DEVNULL,
            )
            for rank in range(2)
        ]

    began = time.monotonic()
    assert [rank.wait(600) for rank in started(files / "a")] == [0, 0]
    whole = time.monotonic() - began
    for path in files.glob("*.reference-*"):
        path.unlink()
    for share in (dice.uniform(0.3, 1.0) for _ in range(5)):
        ranks = started(files / "b")
        deadline = time.monotonic() + share * whole
        while time.monotonic() < deadline and any(rank.poll() is None for rank in ranks):
            time.sleep(0.02)
        for rank in dice.sample(ranks, 2):
            rank.send_signal(signal.SIGKILL)
            rank.wait()
    assert [rank.wait(600) for rank in started(files / "b")] == [0, 0]
    assert latest_iteration(files / "b") == latest_iteration(files / "a")
    a, b = weights(files / "a"), weights(files / "b")
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)
