"""Real trainings that leave out tokens and layers: what they consume, report and go on with."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from megazero.config.pacing import FromZero, Root
from megazero.config.resolve import parse_config
from megazero.config.steps import Progress
from megazero.config.training_plan import training_plan_of
from megazero.train.step.skipping import LayerDrop, SkippingPlan
from tests.train.random_ltd_json import random_ltd_section
from tests.train.test_curriculum import GROWS, LENGTHS, SMALL, run

LTD = (
    "--num-layers 4 --random-ltd --random-ltd-min-value 8 --random-ltd-require-steps 6 "
    "--random-ltd-seq-per-step 8"
)
KEPT = [8, 8, 16, 16, 24, 24, None, None]
PLD = "--num-layers 4 --progressive-layer-drop --pld-theta 0.2 --pld-gamma 0.5"


def layer_tokens(length: int, kept: int | None) -> int:
    """The mean over four layers of which two drop tokens."""
    return length if kept is None or kept >= length else (2 * length + 2 * kept) // 4


def test_the_schedule_by_hand():
    """DeepSpeed's numbers, for steps counted from 0."""
    pacing = FromZero(Root(128, 2048, 200_000, 16))
    expected = {0: 128, 1666: 128, 1667: 144, 100_000: 1088, 199_999: 2032, 200_000: 2048}
    assert {done: pacing.at(done + 1) for done in expected} == expected


def test_tokens_are_those_that_layers_see(tmp_path):
    steps = run(tmp_path, LTD)
    assert [s.get("kept_tokens") for s in steps] == KEPT
    assert [s["consumed_tokens"] for s in steps] == list(np.cumsum([4 * layer_tokens(32, k) for k in KEPT]))
    evaluations = [json.loads(x) for x in (tmp_path / "metrics.eval.jsonl").read_text().splitlines()]
    assert {each["num_tokens"] for each in evaluations} == {4 * 32}
    flops = [s["tflops"] * s["seconds"] for s in steps]
    assert flops == pytest.approx(sorted(flops))
    assert flops[0] < 0.8 * flops[-1]
    speed = [s["tokens_per_second"] * s["seconds"] for s in steps]
    assert speed == pytest.approx([4 * 32] * 8)  # of data


def test_with_growing_sequences_and_a_growing_batch(tmp_path):
    ramp = "--global-batch-size 8 --rampup-batch-size 4 4 12"
    steps = run(tmp_path, LTD, GROWS, ramp)
    sizes = [4, 4, 4, 8, 8, 8, 8, 8]
    assert [s["global_batch_size"] for s in steps] == sizes
    kept = [None if k is None or k >= n else k for k, n in zip(KEPT, LENGTHS, strict=True)]
    assert [s.get("kept_tokens") for s in steps] == kept
    each = [b * layer_tokens(n, k) for b, n, k in zip(sizes, LENGTHS, kept, strict=True)]
    assert [s["consumed_tokens"] for s in steps] == list(np.cumsum(each))


def test_a_training_in_tokens_counts_layer_tokens():
    flags = f"{SMALL} {LTD}".replace("--train-iters 8", "--train-tokens 1024 --lr-decay-tokens 1024")
    training_plan = training_plan_of(parse_config(flags.split(), world_size=1).config, 1)
    before = sum(4 * layer_tokens(32, k) for k in KEPT[:6])
    more = -(-(1024 - before) // 128)
    assert (training_plan.end.iteration, training_plan.end.tokens) == (6 + more, before + 128 * more)
    assert training_plan.lr.decay == 1024


@pytest.mark.parametrize("flags", [f"{LTD} {GROWS}", PLD, f"{LTD} {PLD} --model-family bert"])
def test_a_run_that_stops_goes_on_bit_for_bit(tmp_path, flags):
    whole = run(tmp_path, flags)
    again = (flags, "--save", tmp_path / "run", "--load", tmp_path / "run")
    run(tmp_path, *again, "--exit-interval", 3)
    found = run(tmp_path, *again)
    keys = ("iteration", "consumed_tokens", "lm_loss", "grad_norm", "learning_rate")
    assert [[s[k] for k in keys] for s in found] == [[s[k] for k in keys] for s in whole]


class TestLayerDrop:
    def test_shares_by_hand(self):
        drop = LayerDrop(4, 0.5, 0.1, 1)
        assert drop.keep(0) == 1.0
        assert drop.keep(10) == pytest.approx(0.5 * math.exp(-1) + 0.5)
        assert drop.keep(10**6) == 0.5
        assert drop.scales(0) == (1.0, 1.0, 1.0, 1.0)
        assert {scales[1] for scales in map(drop.scales, range(1000, 1100))} == {0.0, 1 / 0.875}

    def test_each_layer_runs_in_its_share_of_the_steps(self):
        drop, steps = LayerDrop(4, 0.2, 1.0, 3), 4000
        ran = np.mean([[scale > 0 for scale in drop.scales(t)] for t in range(50, 50 + steps)], 0)
        assert ran == pytest.approx([1.0, 0.8, 0.6, 0.4], abs=0.03)

    def test_what_it_adds_is_the_same_on_average(self):
        drop = LayerDrop(4, 0.2, 1.0, 3)
        assert np.mean([drop.scales(t) for t in range(50, 4050)], 0) == pytest.approx([1.0] * 4, abs=0.06)

    def test_steps_and_layers_and_seeds_differ(self):
        drops = [LayerDrop(8, 0.2, 1.0, seed) for seed in (1, 2)]
        draws = [tuple(drop.scales(t)) for drop in drops for t in range(50, 80)]
        assert draws[:30] != draws[30:]
        assert len(set(draws)) > 25


def test_layers_that_ran_are_reported(tmp_path):
    steps = run(tmp_path, PLD)
    config = parse_config(f"{SMALL} {PLD}".split(), world_size=1).config
    plan = SkippingPlan.of(
        config.skipping, config.model.num_layers, config.training.seed, training_plan_of(config, 1)
    )
    expected = [plan.at(Progress(iteration=n)).layers_run for n in range(8)]
    assert [s["layers_run"] for s in steps] == expected
    assert 2 <= min(expected) < 4
    flops = np.array([s["tflops"] * s["seconds"] for s in steps])
    # Each layer costs the same.
    assert np.allclose(np.diff(flops)[np.diff(expected) == 0], 0, atol=1e-12 * flops.max() + 1e-9)
    assert (np.diff(flops)[np.diff(expected) > 0] > 0).all()


def test_experts_that_do_not_run_keep_their_loads(tmp_path):
    experts = "--num-experts 4 --moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 0.01"
    steps = run(tmp_path, PLD, experts, "--log-interval 1")
    assert all(math.isfinite(s["total_loss"]) for s in steps)
    idle = [layer for s in steps for layer in s["tokens_per_expert"] if not sum(layer["tokens"])]
    assert idle


def test_deepspeed_s_sections(tmp_path):
    routing = {"enabled": True, "random_ltd": random_ltd_section(8, 32, 6, 8)}
    section = {"enabled": True, "data_routing": routing}
    drop = {"enabled": True, "theta": 0.25, "gamma": 0.01}
    path = tmp_path / "ds.json"
    found = {"train_micro_batch_size_per_gpu": 2, "data_efficiency": section, "progressive_layer_drop": drop}
    path.write_text(json.dumps(found))
    flags = [*SMALL.split(), "--num-layers", "4", "--deepspeed", "--deepspeed_config", str(path)]
    by_json = parse_config(flags, world_size=1).config.skipping
    more = "--random-ltd-layer-id 1 2 --random-ltd-max-value 32 --random-ltd-layer-num 2 "
    more += "--random-ltd-total-layer-num 4 --progressive-layer-drop --pld-theta 0.25 --pld-gamma 0.01"
    assert by_json == parse_config(f"{SMALL} {LTD} {more}".split(), world_size=1).config.skipping
