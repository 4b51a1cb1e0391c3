"""How steady a training is: values by hand, in a real run, and after a resume."""

from __future__ import annotations

import json
import math
import statistics

import pytest

from megazero.config.resolve import parse_config
from megazero.config.steps import Progress
from megazero.mpu.context import thread_context
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.launch import Launch
from megazero.mpu.thread_group import ThreadWorld
from megazero.train.pretraining import pretrain, pretrain_on
from megazero.train.resume.facts import StateFacts
from megazero.train.step.stability import RunningMoments, Stability
from megazero.train.step.state import TrainState

STABILITY = ("loss_ratio", "loss_deviation", "grad_norm_deviation")
SMALL = (
    "--num-layers 1 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --vocab-size 64 --mock-data "
    "--micro-batch-size 2 --global-batch-size 4 --lr 5e-2 --train-iters 8 --eval-iters 0"
)


def after(losses, norms, window) -> Stability:
    found = Stability()
    for loss, norm in zip(losses, norms, strict=True):
        found = found.after(loss, norm, window)
    return found


def test_within_the_window_it_is_the_plain_deviation():
    losses, norms = [5.0, 4.0, 4.5, 3.0], [1.0, 2.0, 0.5, 0.25]
    for count in range(1, 5):
        found = after(losses[:count], norms[:count], 4)
        assert found.loss.mean == pytest.approx(statistics.fmean(losses[:count]))
        assert found.loss.deviation == pytest.approx(statistics.pstdev(losses[:count]))
        assert found.grad_norm.deviation == pytest.approx(statistics.pstdev(norms[:count]))


def test_beyond_it_older_values_weigh_less():
    losses = [8.0, 1.0, 3.0, 2.0, 6.0, 5.0]
    found = after(losses, losses, 3).loss
    shares = [2 / 3] * 3 + [0.0] * 3  # of the weights of three equal ones, and then a third of all for each
    weights = [1 / 3, 1 / 3, 1 / 3]
    for _ in losses[3:]:
        weights = [w * shares[0] for w in weights] + [1 / 3]
    mean = sum(w * x for w, x in zip(weights, losses, strict=True))
    variance = sum(w * (x - mean) ** 2 for w, x in zip(weights, losses, strict=True))
    assert sum(weights) == pytest.approx(1)
    assert (found.mean, found.variance) == (pytest.approx(mean), pytest.approx(variance))


def test_the_ratio_is_to_the_lowest_loss_before():
    ratios, found = [], Stability()
    for loss in (4.0, 2.0, 3.0, 1.0, 1.5):
        found = found.after(loss, 1.0, 10)
        ratios.append(found.loss_ratio)
    assert ratios == [None, 0.5, 1.5, 0.5, 1.5]
    assert Stability().after(0.0, 1.0, 2).after(1.0, 1.0, 2).loss_ratio is None


def test_what_is_not_finite_changes_nothing():
    found = after([4.0, 2.0], [1.0, 1.0], 5)
    assert found.after(math.nan, 1.0, 5) == found.after(1.0, math.inf, 5) == found


def test_it_survives_a_checkpoint_in_every_bit():
    state = TrainState(Progress(3, 12, 192), 0, after([4.1, 2.3, 1 / 3], [1.0, 0.1, 7.7], 2))
    facts = StateFacts.model_validate_json(json.dumps(state.record()))
    assert facts.train_state() == state
    old = {name: value for name, value in state.record().items() if name != "stability"}
    assert StateFacts.model_validate_json(json.dumps(old)).train_state() == TrainState(Progress(3, 12, 192))
    assert RunningMoments() == RunningMoments(0.0, 0.0)


def run(folder, *flags: object) -> list[dict]:
    metrics = folder / "metrics.jsonl"
    words = " ".join(map(str, (SMALL, "--metrics-jsonl", metrics, *flags))).split()
    pretrain(parse_config(words, world_size=1).config, Launch())
    return [json.loads(line) for line in metrics.read_text().splitlines()]


def test_a_run_reports_it_and_a_resumed_one_goes_on_bit_for_bit(tmp_path, capsys):
    plain = tmp_path / "plain"
    assert not set(STABILITY) & set(run(plain)[-1])
    whole = run(tmp_path / "whole", "--log-stability 3 --log-interval 1", f"--csv-dir {tmp_path / 'csv'}")
    assert (tmp_path / "csv" / "stability_loss-ratio.csv").exists()
    assert "loss deviation: " in capsys.readouterr().out
    losses, norms = ([step[name] for step in whole] for name in ("lm_loss", "grad_norm"))
    assert whole[2]["loss_deviation"] == pytest.approx(statistics.pstdev(losses[:3]))
    assert whole[2]["grad_norm_deviation"] == pytest.approx(statistics.pstdev(norms[:3]))
    assert whole[7]["loss_ratio"] == pytest.approx(losses[7] / min(losses[:7]))
    assert "loss_ratio" not in whole[0]
    again = ("--log-stability 3 --save", tmp_path / "run", "--load", tmp_path / "run")
    for stop in ("--exit-interval 5", ""):
        found = run(tmp_path / "again", *again, stop)
    keys = ("iteration", "lm_loss", *STABILITY)
    assert [[s.get(k) for k in keys] for s in found] == [[s.get(k) for k in keys] for s in whole]


def test_skipped_steps_are_left_out_and_all_ranks_know_the_same(tmp_path):
    """The first steps overflow in fp16 at this loss scale."""
    flags = f"{SMALL} --log-stability 4 --fp16 --initial-loss-scale 1e7 --hysteresis 1 --train-iters 16"
    world, grid = ThreadWorld(2), ProcessGrid(dp=2)
    metrics = tmp_path / "metrics.jsonl"
    config = parse_config(f"{flags} --metrics-jsonl {metrics}".split(), world_size=2).config
    states = world.run(lambda rank: pretrain_on(config, thread_context(world, grid, rank)))
    assert states[0].stability == states[1].stability
    steps = [json.loads(line) for line in metrics.read_text().splitlines()]
    skipped = sum(step["skipped"] for step in steps)
    assert 0 < skipped < 16
    assert states[0].stability.updates == 16 - skipped == states[0].iteration - states[0].skipped
    assert not any(set(STABILITY) & set(step) for step in steps if step["skipped"])
