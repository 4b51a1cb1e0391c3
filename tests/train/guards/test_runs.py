"""Guarded runs: what is set aside stays so, on any layout and after a resume; copies are equal or named."""

from __future__ import annotations

import json
import math

import pytest

from megazero.checkpoint.folder import iteration_folder
from megazero.checkpoint.reader import CheckpointReader
from proofs.fault_matrix.faults import AfterUpdate, FlippedBit
from proofs.fault_matrix.runs import Outcome, Setting, train

FLAGS = "--global-batch-size 8 --train-iters 36 --save-interval 10 --spike-window 20 "
NOISE = range(8 * 32, 8 * 33)  # the samples of step 33
ASIDE = ((8 * 31, 8 * 33),)  # with those of the step before


def losses(path) -> dict[int, float]:
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return {each["iteration"]: each["lm_loss"] for each in records}


def train_with_metrics(where: Setting, folder, flags: str = "", **rest) -> tuple[Outcome, dict[int, float]]:
    path = folder.with_suffix(".jsonl")
    outcome = train(where, folder, f"{FLAGS} --metrics-jsonl {path} {flags}", **rest)
    return outcome, losses(path)


@pytest.mark.slow
def test_after_a_rollback_a_run_is_as_one_that_never_saw_the_batch(tmp_path):
    """On two layouts, which set the same samples aside, and by hand."""
    found = {}
    for where in (Setting.of(dp=2), Setting.of(tp=2, stage=0)):
        name = where.name.replace(" ", "")
        outcome, found[name] = train_with_metrics(where, tmp_path / name, "--on-spike rollback", noise=NOISE)
        assert {state.set_aside for state in outcome.states} == {ASIDE}
        assert [(each["kind"], each["action"]) for each in outcome.incidents] == [("spike", "rolled back")]
    outcome, without = train_with_metrics(
        Setting.of(), tmp_path / "without", "--iterations-to-skip 31 32", noise=NOISE
    )
    assert outcome.incidents == ()
    first, second = found.values()
    for iteration, loss in without.items():
        if iteration in (32, 33):
            assert loss is first[iteration] is second[iteration] is None
        else:
            assert math.isclose(first[iteration], loss, abs_tol=1e-3)
            assert math.isclose(second[iteration], loss, abs_tol=1e-3)


@pytest.mark.slow
def test_a_resume_sets_the_same_aside(tmp_path):
    """Whether the run stopped before the spike, or after the first checkpoint beyond it."""
    whole, wanted = train_with_metrics(
        Setting.of(dp=2), tmp_path / "whole", "--on-spike rollback", noise=NOISE
    )
    for stop in (30, 34):
        folder = tmp_path / str(stop)
        flags = f"--on-spike rollback --load {folder}"
        train_with_metrics(Setting.of(dp=2), folder, f"{flags} --exit-interval {stop}", noise=NOISE)
        outcome, found = train_with_metrics(Setting.of(dp=2), folder, flags, noise=NOISE)
        assert {state.set_aside for state in outcome.states} == {ASIDE}
        assert found == wanted
    assert whole.saved == (10, 20, 30, 36)


def test_what_is_held_back_changes_nothing(tmp_path):
    """A step whose update is left out, and one that is passed over, leave the same weights."""
    skipped, one = train_with_metrics(Setting.of(dp=2), tmp_path / "a", "--on-spike skip", noise=NOISE)
    passed, other = train_with_metrics(
        Setting.of(dp=2), tmp_path / "b", "--iterations-to-skip 32", noise=NOISE
    )
    assert {i: loss for i, loss in one.items() if i != 33} == {
        i: loss for i, loss in other.items() if i != 33
    }
    assert one[33] > 4
    assert [state.skipped for state in (*skipped.states, *passed.states)] == [1] * 4


@pytest.mark.parametrize(("noise", "healthy"), [(range(0), True), (range(8 * 28, 8 * 29), False)])
def test_a_checkpoint_knows_whether_its_run_was_healthy(tmp_path, noise, healthy):
    train(Setting.of(), tmp_path / "run", FLAGS, noise=noise)
    facts = {i: CheckpointReader(iteration_folder(tmp_path / "run", i)).facts for i in (20, 30, 36)}
    assert [each["healthy"] for each in facts.values()] == [True, healthy, healthy]


def test_the_newest_healthy_checkpoint_is_not_pruned(tmp_path):
    """One is kept, and the later ones are of a run in a spike."""
    flags = FLAGS.replace("--save-interval 10", "--save-interval 2") + "--keep-last 1"
    outcome = train(Setting.of(), tmp_path / "run", flags, noise=range(8 * 28, 8 * 29))
    assert outcome.saved == (28, 36)


def test_without_a_checkpoint_the_update_is_left_out_instead(tmp_path):
    flags = FLAGS.replace("--save-interval 10", "--save-interval 34") + "--on-spike rollback"
    outcome = train(Setting.of(dp=2), tmp_path / "run", flags, noise=NOISE)
    assert [each["action"] for each in outcome.incidents] == ["skipped"]
    assert {state.set_aside for state in outcome.states} == {()}


@pytest.mark.parametrize(
    ("where", "name", "kind"),
    [
        (Setting.of(dp=2), "layers.1.mlp.down.weight", "weight"),
        (Setting.of(tp=2, dp=2, stage=1), "final_norm.weight", "exp_avg"),
        (Setting.of(pp=2), "weight", "exp_avg_sq"),
    ],
)
def test_one_bit_is_enough(tmp_path, where, name, kind):
    last = where.grid.world_size - 1
    spoils = {last: AfterUpdate(4, FlippedBit(name, kind))}
    flags = "--global-batch-size 8 --train-iters 6 --check-weights-interval 2"
    outcome = train(where, tmp_path / "run", flags, spoils=spoils)
    assert outcome.status == 1
    assert {str(error) for error in outcome.errors} == {str(outcome.errors[0])}
    assert "after iteration 4" in str(outcome.errors[0])
    assert last in outcome.incidents[0]["ranks"]


@pytest.mark.parametrize(
    "where",
    [
        Setting.of(dp=2, stage=0, dtype="bf16"),
        Setting.of(tp=2, pp=2, stage=0),
        Setting.of(tp=2, dp=2, stage=2, dtype="bf16"),
        Setting.of(pp=2, dp=2, stage=3),
        Setting.of(tp=2, dp=2, stage=3, dtype="fp16"),
    ],
)
def test_copies_of_a_healthy_run_are_equal(tmp_path, where):
    """At every step, on layouts in which every axis has copies."""
    outcome = train(
        where, tmp_path / "run", "--global-batch-size 8 --train-iters 5 --check-weights-interval 1"
    )
    assert (outcome.status, outcome.incidents) == (0, ())
