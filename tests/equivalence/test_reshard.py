"""A checkpoint has no topology: what one layout saves, another loads, saves and continues.

A training goes around a circle of layouts and back, so that each of them once reads what another saved and
once saves for another; every value of every setting occurs among them. `--slow` takes each pair of neighbours
there and back, `--all-layouts` hundreds of pairs, of up to eight ranks.
"""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from megazero.config.training_plan import training_plan_of
from megazero.mpu.context import thread_context
from megazero.mpu.thread_group import ThreadWorld
from megazero.train.resume.snapshot import Snapshots
from megazero.verify.record import verification_engine
from proofs.reshard_sweep import (
    EXTRA,
    SMALL,
    Case,
    cases,
    check,
    circles,
    context_circle,
    difference,
    expert_circles,
    flat,
    hybrid_circle,
    logical,
    pairs,
    run,
)
from tests.layouts.layout import Layout

COUNT = 43
RANKS = 4


def pytest_generate_tests(metafunc):
    if "circle" in metafunc.fixturenames:
        options = metafunc.config.option
        around = [*(circles(400, 8) if options.all_layouts else circles(COUNT, RANKS)), *expert_circles()]
        whole = not (options.slow or options.all_layouts)
        chosen = around if whole else pairs(around)
        metafunc.parametrize(
            "circle",
            [
                pytest.param(
                    circle,
                    id=" to ".join(case.name for case in circle[:2]),
                    marks=[pytest.mark.fast] * (len(circle) == 3),
                )
                for circle in chosen
            ],
        )


@pytest.mark.seconds(6)
def test_there_and_back(tmp_path, circle):
    assert check(circle, tmp_path).wrong == ()


@pytest.mark.slow
def test_the_ranks_that_share_sequences_change(tmp_path):
    circle = context_circle()
    around = [*circle, circle[0]]
    changes = [(a.layout.cp, b.layout.cp) for a, b in pairwise(around)]
    assert len(changes) >= 20
    assert all(a != b for a, b in changes)
    assert {cp for change in changes for cp in change} == {1, 2, 3, 4}
    assert not any(case.layout.broken_rules() for case in circle)
    assert check(circle, tmp_path).wrong == ()


DEEPSEEK = Layout(shape="deepseek", untied=True, experts="biased", samples=4)


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_deepseek_moves_between_layouts(count, tmp_path):
    """Small vectors, routers of further tokens, and the copy of the embedding on the last stage."""
    changes = (
        {"tp": 2, "pp": 2, "sequence_parallel": True},
        {"dp": 2, "zero": 3, "ep": 2},
        {"pp": 2, "schedule": "zb-h1", "zero": 1},
        {"pp": 2, "schedule": "zb-v", "recompute": "full", "tp": 2, "ep": 2, "etp": 1},
    )
    model = replace(DEEPSEEK, layers=count)
    circle = [Case(replace(model, **change)) for change in changes[:count]]
    assert not any(case.layout.broken_rules() for case in circle)
    assert check(circle, tmp_path).wrong == ()


@pytest.mark.slow
def test_layers_of_their_own_sizes_move_between_layouts(tmp_path):
    changes = (
        {"tp": 2, "sequence_parallel": True, "zero": 1, "dp": 2},
        {"pp": 2, "zero": 3, "dp": 2},
        {"pp": 2, "schedule": "zb-v", "tp": 2},
        {"pp": 4, "schedule": "1f1b", "store": "nvme"},
    )
    circle = [Case(Layout(widths="empty", layers=4, samples=4, **change)) for change in changes]
    assert not any(case.layout.broken_rules() for case in circle)
    assert check(circle, tmp_path).wrong == ()


@pytest.mark.slow
def test_experts_by_the_ids_of_tokens_move_between_layouts(tmp_path):
    changes = (
        {"tp": 2, "sequence_parallel": True, "dp": 2, "ep": 2, "zero": 3},
        {"pp": 2, "schedule": "zb-h1", "dp": 2, "ep": 2},
    )
    circle = [Case(Layout(experts="hashed", samples=4, **change)) for change in changes]
    assert not any(case.layout.broken_rules() for case in circle)
    assert check(circle, tmp_path).wrong == ()


@pytest.mark.slow
def test_the_ranks_of_state_space_layers_change(tmp_path):
    circle = hybrid_circle()
    assert not any(case.layout.broken_rules() for case in circle)
    assert check(circle, tmp_path).wrong == ()


def test_experts_change_their_ranks_with_every_other_setting():
    chosen = pairs(expert_circles())
    assert len(chosen) >= 20
    for first, second in chosen:
        assert first.model == second.model
        assert first != second
        assert not first.layout.broken_rules()
        assert first.layout.world_size <= RANKS
    change_of_ep = [(a.layout, b.layout) for a, b in chosen if a.layout.ep != b.layout.ep]
    assert len(change_of_ep) >= 15
    for name in ("tp", "pp", "dp", "zero", "etp", "sequence_parallel", "dispatcher"):
        assert any(getattr(a, name) != getattr(b, name) for a, b in change_of_ep), name
    both = {(min(a.ep, b.ep), max(a.ep, b.ep)) for a, b in change_of_ep}
    assert both == {(1, 2), (1, 4), (2, 4)}


def test_what_routers_remember_is_saved_and_its_loss_is_seen(tmp_path, monkeypatch):
    """Loads and biases are tensors of a checkpoint; one that is not loaded shows in what is saved next."""
    first, second = pairs(expert_circles())[1]
    run(first, None, tmp_path / "seen", 0)
    saved = {name: each for name, each in logical(tmp_path / "seen").items() if name.endswith("/router")}
    assert sorted(saved) == [
        f"layers.{layer}.mlp.router.{what}/router" for layer in (0, 1) for what in ("bias", "load")
    ]
    assert all(tensor.shape == (8,) and tensor.abs().max() > 0 for tensor in saved.values())
    monkeypatch.setattr("megazero.train.resume.keepers.Routers.parts_from", lambda self, source: [])
    wrong = check((first, second), tmp_path).wrong
    assert any(each.startswith(f"saved on {second.name}: layers.0.mlp.router.") for each in wrong)


def test_every_value_of_every_setting_is_on_both_sides():
    everything = [*EXTRA, *cases(RANKS)]
    chosen = pairs(circles(COUNT, RANKS))
    assert len(chosen) >= 40
    assert chosen == pairs(circles(COUNT, RANKS))
    assert all(first.model == second.model and first != second for first, second in chosen)
    for side in zip(*chosen, strict=True):
        assert {case.partition for case in side} == {case.partition for case in everything}
        for name in (field.name for field in fields(Layout)):
            values = {getattr(case.layout, name) for case in everything}
            assert {getattr(case.layout, name) for case in side} == values, name
    assert {case.layout.tp for case in everything} == {case.layout.pp for case in everything} == {1, 2, 4}


def test_the_vocabulary_is_padded_differently(tmp_path):
    sizes = {}
    for tp in (1, 2, 4):
        case, world = Case(replace(SMALL, tp=tp)), ThreadWorld(tp)

        def padded(rank, case=case, world=world):
            context = thread_context(world, case.layout.grid, rank)
            config = case.config()
            engine = verification_engine(config, training_plan_of(config, context.data.size), context)
            return {
                c.padded_size
                for b in engine.optimizer.store.buckets
                for s in b.layout.specs
                for c in s.cuts
                if c.padded_size
            }

        sizes[tp] = world.run(padded)[-1]
    assert sizes == {1: {36}, 2: {40}, 4: {48}}


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_copies_of_a_parameter_stay_equal_on_all_tensor_parallel_ranks(tmp_path: Path, sequence_parallel):
    """One of them is saved and loaded by all: if they differed, a resumed run would not be the same.

    They did, in the last bit of a second moment: on the first rank, which counts such parameters in norms, an
    update took them in one piece with others, and where a piece ends decides how its elements are rounded.
    """
    case = Case(replace(SMALL, layers=8, tp=4, sequence_parallel=sequence_parallel))
    ranks = [flat(seen.state) for seen in run(case, None, tmp_path, 0)]
    replicated = [name for name in ranks[0] if "norm" in name or "position" in name or "out.bias" in name]
    assert len(replicated) >= 3 * (8 * 5 + 3)
    for state in ranks[1:]:
        assert difference(*({name: each[name] for name in replicated} for each in (ranks[0], state))) is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: {**t, "b": t["b"].nextafter(t["b"] + 1)}, "b differs in 3 elements"),
        (lambda t: {**t, "b": t["b"].double()}, "b is torch.float32 [3], then torch.float64 [3]"),
        (lambda t: {**t, "b": t["b"][:2]}, "b is torch.float32 [3], then torch.float32 [2]"),
        (lambda t: {"a": t["a"]}, "b is on one side only"),
        (lambda t: {k: v.clone() for k, v in t.items()}, None),
    ],
    ids=["a bit", "dtype", "shape", "missing", "equal"],
)
def test_a_difference_is_seen(change, said):
    tensors = {"a": torch.ones(()), "b": torch.arange(3.0)}
    assert difference(tensors, change(tensors)) == said


def test_a_checkpoint_that_changes_on_its_way_is_seen(tmp_path, monkeypatch):
    save, saves = Snapshots.save, []

    def altered(self, state):
        saves.append(self)
        if len(saves) == 3:  # on B, which has one rank
            store = self.engine.optimizer.store
            store.at_rest(store.buckets[0])["weight"][5] += 1e-3
        return save(self, state)

    monkeypatch.setattr(Snapshots, "save", altered)
    first, second = Case(replace(SMALL, tp=2)), Case(SMALL)
    wrong = check((first, second), tmp_path).wrong
    assert {each.split(":")[0] for each in wrong} >= {
        f"saved on {second.name}",
        f"saved on {first.name} again",
        "state of rank 0",
    }
