"""A real training with growing sequences: what it consumes, what it evaluates, and how it goes on."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from megazero.config.resolve import parse_config
from megazero.config.training_plan import training_plan_of
from megazero.mpu.context import solo_context
from megazero.mpu.launch import Launch
from megazero.train.parts.feeds import build_feeds
from megazero.train.parts.vocabulary import build_vocabulary
from megazero.train.pretraining import pretrain

SMALL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --vocab-size 64 --mock-data "
    "--micro-batch-size 2 --global-batch-size 4 --lr 1e-2 --train-iters 8 --eval-interval 4 --eval-iters 1"
)
GROWS = "--seqlen-schedule fixed_linear --seqlen-min-difficulty 8 --seqlen-total-curriculum-step 6"
LENGTHS = [8, 16, 16, 24, 24, 32, 32, 32]


def run(folder: Path, *flags: object) -> list[dict]:
    """Train in this process; the metrics of every iteration."""
    metrics = folder / "metrics.jsonl"
    argv = [word for each in (SMALL, "--metrics-jsonl", metrics, *flags) for word in str(each).split()]
    pretrain(parse_config(argv, world_size=1).config, Launch())
    return [json.loads(line) for line in metrics.read_text().splitlines()]


def test_tokens_are_those_that_were_trained_on(tmp_path):
    steps = run(tmp_path, GROWS)
    assert [s["consumed_tokens"] for s in steps] == list(np.cumsum([4 * length for length in LENGTHS]))
    assert [s["consumed_samples"] for s in steps] == [4 * n for n in range(1, 9)]
    evaluations = [json.loads(x) for x in (tmp_path / "metrics.eval.jsonl").read_text().splitlines()]
    assert {each["num_tokens"] for each in evaluations} == {4 * 32}  # whole sequences
    # FLOPs of a token grow with what it attends to.
    flops = [s["tflops"] * s["seconds"] / (4 * n) for s, n in zip(steps, LENGTHS, strict=True)]
    assert flops[0] < flops[-1] < 1.5 * flops[0]
    assert flops[1] == pytest.approx(flops[2], rel=1e-6)


def test_a_run_that_stops_in_the_ramp_goes_on_bit_for_bit(tmp_path):
    whole = run(tmp_path, GROWS)
    for stop in (2, 3):
        folder = tmp_path / str(stop)
        folder.mkdir()
        again = (GROWS, "--save", folder / "run", "--load", folder / "run")
        run(folder, *again, "--exit-interval", stop)
        found = run(folder, *again)
        keys = ("iteration", "consumed_tokens", "lm_loss", "grad_norm", "learning_rate")
        assert [[s[k] for k in keys] for s in found] == [[s[k] for k in keys] for s in whole]


def test_a_training_in_tokens_takes_more_steps(tmp_path):
    flags = f"{SMALL} {GROWS}".replace("--train-iters 8", "--train-tokens 1024 --lr-decay-tokens 1024")
    config = parse_config(flags.split(), world_size=1).config
    end = training_plan_of(config, 1).end
    before = sum(4 * n for n in LENGTHS)
    steps = len(LENGTHS) + -(-(1024 - before) // (4 * 32))
    assert (before, steps) == (736, 11)
    assert (end.iteration, end.tokens) == (11, before + 3 * 4 * 32)


def test_deepspeed_s_section_is_the_same_schedule(tmp_path):
    section = {
        "enabled": True,
        "curriculum_type": "seqlen",
        "min_difficulty": 8,
        "max_difficulty": 32,
        "schedule_type": "fixed_linear",
        "schedule_config": {"total_curriculum_step": 6, "difficulty_step": 8},
    }
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"train_micro_batch_size_per_gpu": 2, "curriculum_learning": section}))
    flags = [*SMALL.split(), "--deepspeed", "--deepspeed_config", str(path)]
    by_json = parse_config(flags, world_size=1).config.curriculum
    by_flags = parse_config([*SMALL.split(), *GROWS.split(), "--seqlen-max-difficulty", "32"], world_size=1)
    assert by_json == by_flags.config.curriculum


def test_a_bert_s_samples_are_cut_with_all_that_belongs_to_them(tmp_path):
    steps = run(tmp_path, "--model-family bert", GROWS)
    assert [s["consumed_tokens"] for s in steps] == list(np.cumsum([4 * length for length in LENGTHS]))
    assert [s["sequence_length"] for s in steps] == LENGTHS
    assert all(s["lm_loss"] > 3 for s in steps)


def test_levels_beside_another_schedule_are_not_read(tmp_path):
    """As in DeepSpeed: a ramp does not look at them."""
    section = {
        "enabled": True,
        "min_difficulty": 8,
        "schedule_type": "fixed_linear",
        "schedule_config": {"total_curriculum_step": 6, "difficulty": [8, 32], "max_step": [3]},
    }
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"train_micro_batch_size_per_gpu": 2, "curriculum_learning": section}))
    flags = [*SMALL.split(), "--deepspeed", "--deepspeed_config", str(path)]
    found = parse_config(flags, world_size=1).config.curriculum
    assert found == parse_config([*SMALL.split(), *GROWS.split()], world_size=1).config.curriculum


def test_reshaped_samples_are_trained_on_whole(tmp_path):
    """24 does not divide 32, so those steps leave 8 tokens of each sample out; the others take all of it."""
    steps = run(tmp_path, GROWS, "--seqlen-kind reshape")
    used = [4 * (32 // length) * length for length in LENGTHS]
    assert used == [128, 128, 128, 96, 96, 128, 128, 128]
    assert [s["consumed_tokens"] for s in steps] == list(np.cumsum(used))
    assert [s["consumed_samples"] for s in steps] == [4 * n for n in range(1, 9)]
    assert [s["sequence_length"] for s in steps] == LENGTHS
    folder = tmp_path / "again"
    again = (GROWS, "--seqlen-kind reshape --save", folder / "run", "--load", folder / "run")
    folder.mkdir()
    run(folder, *again, "--exit-interval", 3)
    found = run(folder, *again)
    keys = ("iteration", "consumed_tokens", "lm_loss", "grad_norm", "learning_rate")
    assert [[s[k] for k in keys] for s in found] == [[s[k] for k in keys] for s in steps]


def test_what_is_consumed_is_the_labels_that_count():
    """Tokens counted, positions that the loss counts, and positions of the batches are the same number."""
    argv = [*SMALL.split(), *GROWS.split(), "--seqlen-kind", "reshape"]
    config, context = parse_config(argv, world_size=1).config, solo_context()
    vocabulary = build_vocabulary(config)
    training_plan = training_plan_of(config, 1)
    feed = build_feeds(config, training_plan, vocabulary, context, 3).train
    for done in range(8):
        step = training_plan.at(training_plan.before(done))
        batches = feed.micro_batches(step.before.samples, step.micro_batches, step.sequence_length, step.rows)
        assert sum(batch.counts["lm"] for batch in batches) == step.tokens
        assert {tuple(batch.tokens.shape) for batch in batches} == {(2 * step.rows, step.sequence_length)}
    feed.close()


def test_tokens_decide_the_end_of_a_reshaped_training_too():
    flags = f"{SMALL} {GROWS} --seqlen-kind reshape".replace("--train-iters 8", "--train-tokens 900")
    end = training_plan_of(parse_config(flags.split(), world_size=1).config, 1).end
    assert (end.iteration, end.tokens) == (8, 960)


def test_a_schedule_of_one_s_own_trains(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("def grow(count):\n    return min(32, 8 * count)\n")
    steps = run(tmp_path, f"--seqlen-schedule custom --seqlen-custom-schedule {path}:grow")
    assert [s["sequence_length"] for s in steps] == [8, 16, 24, 32, 32, 32, 32, 32]
