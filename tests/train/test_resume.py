"""Law 3 on one layout: k steps equal j steps, a stop and a resume, bit for bit."""

from __future__ import annotations

import json
import os
import signal
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megazero.checkpoint.folder import iteration_folder, latest_iteration
from megazero.config.resolve import parse_config
from megazero.config.training_plan import training_plan_of
from megazero.config.tree.checkpoint import CheckpointConfig
from megazero.errors import CheckpointError
from megazero.mpu.context import thread_context
from megazero.mpu.launch import Launch
from megazero.mpu.thread_group import ThreadWorld
from megazero.train.pretraining import pretrain
from megazero.train.resume.resume import resume
from megazero.train.resume.snapshot import Snapshots
from megazero.train.step.state import TrainState
from megazero.train.step.timers import Timers
from megazero.verify.record import micro_batches, verification_engine
from tests.forks import start_ranks
from tests.layouts.layout import VOCABULARY, Layout

SMALL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --vocab-size 64 --mock-data "
    "--micro-batch-size 2 --global-batch-size 8 --rampup-batch-size 4 4 20 --lr 1e-3 --lr-warmup-iters 3 "
    "--lr-decay-style cosine --train-iters 8 --eval-interval 4 --eval-iters 1 --log-interval 4"
)

EXPERTS = (
    "--num-experts 4 --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    "--moe-router-bias-update-rate 0.02 --moe-router-load-balancing-type global_aux_loss "
    "--moe-aux-loss-coeff 0.05 --moe-expert-capacity-factor 1.0 --moe-token-drop-policy random"
)


def run(*flags: object, small: str = SMALL) -> list[dict]:
    """Train in this process; the metrics of every iteration."""
    argv = [*small.split(), *map(str, flags)]
    pretrain(parse_config(argv, world_size=1).config, Launch())
    path = Path(argv[argv.index("--metrics-jsonl") + 1])
    return [json.loads(line) for line in path.read_text().splitlines()]


def curve(records: list[dict]) -> list[tuple]:
    keys = ("iteration", "consumed_samples", "consumed_tokens", "lm_loss", "grad_norm", "learning_rate")
    return [tuple(r[k] for k in keys) for r in records]


def tensors(folder: Path, iteration: int) -> dict[str, torch.Tensor]:
    whole = {}
    for path in sorted(iteration_folder(folder, iteration).glob("*.safetensors")):
        whole.update({f"{path.stem}/{k}": v for k, v in load_file(path).items()})
    return whole


@pytest.mark.parametrize(
    ("dtype", "more"),
    [
        ("fp32", ""),
        pytest.param("bf16", "", marks=pytest.mark.fast),
        ("fp16", "--initial-loss-scale 4096"),
        ("fp32", "--model-family bert --bert-pack --optimizer lamb --hidden-dropout 0.1"),
        ("bf16", EXPERTS),
        ("fp32", "--model-family t5 --position-embedding-type relative --decoder-seq-length 8"),
        ("bf16", "--fp8-format hybrid --fp8-amax-history-len 3 --fp8-amax-compute-algo max"),
    ],
)
def test_resumed_training_is_bit_identical(tmp_path, dtype, more):
    flags = ["--params-dtype", dtype, *more.split()]
    straight = run(*flags, "--metrics-jsonl", tmp_path / "a.jsonl", "--save", tmp_path / "a")
    assert [r["global_batch_size"] for r in straight][:1] == [4], "the ramp is meant to be under way"
    both = ["--metrics-jsonl", tmp_path / "b.jsonl", "--save", tmp_path / "b", "--load", tmp_path / "b"]
    run(*flags, *both, "--exit-interval", 3)
    assert latest_iteration(tmp_path / "b") == 3
    resumed = run(*flags, *both)
    assert curve(resumed) == curve(straight)
    a, b = tensors(tmp_path / "a", 8), tensors(tmp_path / "b", 8)
    assert a.keys() == b.keys()
    assert all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(pp=2, dp=2, zero=3, schedule="zb-v", layers=4, dropout=0.1),
        Layout(pp=2, dp=2, zero=2, dtype="bf16"),
        Layout(tp=2, dp=2, zero=1, dtype="bf16", sequence_parallel=True),
        Layout(tp=2, pp=2, dp=2, zero=3, shape="bert", dropout=0.1, optimizer="lamb"),
        Layout(tp=2, dp=2, zero=1, dtype="bf16", shape="llama", optimizer="muon"),
        Layout(pp=2, dp=2, zero=2, optimizer="nadam"),
        Layout(tp=2, pp=2, dp=2, zero=1, fp8="delayed"),
        Layout(dp=2, ep=2, zero=2, experts="biased", dtype="bf16", dropout=0.1),
        Layout(tp=2, dp=2, ep=2, zero=3, experts="shared", sequence_parallel=True),
        Layout(pp=2, tp=2, ep=2, etp=1, schedule="zb-h1", experts="noisy"),
    ],
    ids=lambda layout: layout.name,
)
def test_a_sharded_pipeline_resumes_bit_for_bit(tmp_path, layout):
    world, folder = ThreadWorld(layout.world_size), str(tmp_path)
    checkpoint = CheckpointConfig(save=folder, load=folder)
    config = layout.config().model_copy(update={"checkpoint": checkpoint})
    training_plan = training_plan_of(config, layout.dp)

    def train(engine, context, state, steps):
        for _ in range(steps):
            step = training_plan.at(state.progress)
            batches = micro_batches(config, context, step)
            result = engine.train_step(batches, state.progress, Timers())
            state = state.after(step, result.skipped)
        everything = engine.optimizer.full_state()
        found = [(s.name, {k: t.clone() for k, t in kinds.items()}) for s, kinds in everything]
        remembered = {name: tensor.clone() for name, tensor in engine.loads.state().items()}
        return state, found, remembered

    def work(rank):
        context = thread_context(world, layout.grid, rank)
        engine = verification_engine(config, training_plan, context)
        state, *_ = train(engine, context, TrainState(), 2)
        snapshots = Snapshots(config, training_plan, engine, context, VOCABULARY, config.training.seed)
        snapshots.save(state)
        snapshots.saver.close()
        _, *straight = train(engine, context, state, 2)
        build = partial(verification_engine, context=context)
        resumed = resume(config, context, VOCABULARY, build)
        assert resumed.state.iteration == 2
        return straight, train(resumed.engine, context, resumed.state, 2)[1:]

    for (straight, loads), (resumed, loads_again) in world.run(work):
        assert loads.keys() == loads_again.keys()
        assert bool(loads) == bool(layout.experts)
        assert all(torch.equal(each, loads_again[name]) for name, each in loads.items())
        assert [name for name, _ in straight] == [name for name, _ in resumed]
        for (name, want), (_, got) in zip(straight, resumed, strict=True):
            adam = {"weight", "exp_avg", "exp_avg_sq"}
            of_muon = layout.optimizer == "muon" and want.keys() == {"weight", "momentum"}
            assert want.keys() == got.keys() == (want.keys() if of_muon else adam)
            assert all(torch.equal(want[kind], got[kind]) for kind in want), name


@pytest.mark.parametrize(
    ("limit", "stop", "batch", "samples"),
    [
        ("--train-iters 8", 7, 4, [4, 8, 12, 16, 20, 28, 36, 40]),
        ("--train-samples 40", 4, 12, [4, 8, 12, 16, 24, 36]),
        ("--train-tokens 640", 4, 12, [4, 8, 12, 16, 24, 36, 48]),
    ],
)
def test_another_batch_size_for_the_rest_keeps_the_limit(tmp_path, limit, stop, batch, samples):
    """The end was once counted as if all steps had the new size.

    The first of these asked for data past that end and failed; the others stopped after iterations 5 and 6.
    """
    small = SMALL.replace("--train-iters 8", limit)
    both = ["--metrics-jsonl", tmp_path / "m.jsonl", "--save", tmp_path / "c", "--load", tmp_path / "c"]
    run(*both, "--exit-interval", stop, small=small)
    records = run(*both, "--global-batch-size", batch, "--override-opt_param-scheduler", small=small)
    assert [record["consumed_samples"] for record in records] == samples


@pytest.mark.gloo
def test_sigterm_saves_and_exits_cleanly(tmp_path):
    """The real program, two ranks: a SIGTERM to one of them ends both with a checkpoint."""
    metrics = tmp_path / "m.jsonl"
    command = [
        *("pretrain_gpt.py", *SMALL.split(), "--train-iters", "100000", "--tensor-model-parallel-size", 2),
        *("--metrics-jsonl", metrics, "--save", tmp_path / "c"),
    ]
    ranks = start_ranks(command, command)
    deadline = time.monotonic() + 90
    while not (metrics.exists() and metrics.read_text().count("\n") >= 2):
        assert not any(rank.ended for rank in ranks), [rank.result() for rank in ranks]
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(ranks[1].pid, signal.SIGTERM)
    done = [rank.result(60) for rank in ranks]
    assert [rank.returncode for rank in done] == [0, 0], done
    assert "stopping after iteration" in done[0].stdout
    saved = latest_iteration(tmp_path / "c")
    assert saved == json.loads(metrics.read_text().splitlines()[-1])["iteration"]


def test_finetune_takes_weights_and_starts_anew(tmp_path):
    run("--metrics-jsonl", tmp_path / "a.jsonl", "--save", tmp_path / "a")
    again = run("--metrics-jsonl", tmp_path / "b.jsonl", "--load", tmp_path / "a", "--finetune")
    assert again[0]["iteration"] == 1
    first = json.loads((tmp_path / "a.jsonl").read_text().splitlines()[0])
    assert again[0]["lm_loss"] != first["lm_loss"]


def test_a_changed_schedule_is_refused_unless_overridden(tmp_path):
    run("--metrics-jsonl", tmp_path / "a.jsonl", "--save", tmp_path / "a", "--exit-interval", 4)
    flags = ["--metrics-jsonl", tmp_path / "a.jsonl", "--load", tmp_path / "a", "--lr", "5e-4"]
    with pytest.raises(CheckpointError, match=r"peak of the learning rate 0.001 -> 0.0005.*--override-opt"):
        run(*flags)
    resumed = run(*flags, "--override-opt_param-scheduler")
    assert max(r["learning_rate"] for r in resumed[4:]) < 5e-4


def test_exit_by_duration_saves(tmp_path):
    records = run(
        *("--metrics-jsonl", tmp_path / "a.jsonl", "--save", tmp_path / "a"),
        *("--exit-duration-in-mins", "1e-6"),
    )
    assert len(records) == 1
    assert latest_iteration(tmp_path / "a") == 1


def test_evaluation_leaves_training_untouched(tmp_path):
    often = run("--metrics-jsonl", tmp_path / "a.jsonl", "--eval-interval", 1)
    never = run("--metrics-jsonl", tmp_path / "b.jsonl", "--eval-iters", 0)
    assert curve(often) == curve(never)


def test_missing_checkpoint(tmp_path, capsys):
    flags = ("--metrics-jsonl", tmp_path / "a.jsonl", "--load", tmp_path / "nothing")
    # --finetune once trained from random weights without a word.
    for needs in ("--exit-on-missing-checkpoint", "--finetune"):
        with pytest.raises(CheckpointError, match=f"with {needs}, but .* has none"):
            run(*flags, needs)
    assert "warning:" not in capsys.readouterr().out
    assert len(run(*flags)) == 8
    said = capsys.readouterr().out
    assert (
        said.count(f"warning: {tmp_path / 'nothing'} holds no checkpoint; training starts from random") == 1
    )
