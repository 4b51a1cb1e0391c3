"""A save that is stopped at any change of the file system, or by a power cut there, leaves whole checkpoints.

Every scenario is stopped before each of its changes, and within each write. What is on the disk then, and all
that a power cut may leave, must hold the newest checkpoint whose save had returned or the one under way,
bit for bit; what ``latest`` names must load; and the next job clears what was left and saves.
"""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from megazero.checkpoint.box import Box
from megazero.checkpoint.folder import (
    Retention,
    candidates,
    hidden_folder,
    iteration_folder,
    latest_iteration,
    saved_iterations,
)
from megazero.checkpoint.lock import LOCK
from megazero.checkpoint.part import Key, Part
from megazero.checkpoint.reader import CheckpointReader
from megazero.checkpoint.saver import Saver
from megazero.errors import CommunicationError
from megazero.mpu.context import ParallelContext, solo_context, thread_context
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.thread_group import ThreadWorld
from tests.checkpoint.faulty_disk import FaultyDisk, StopAt, Stopped
from tests.checkpoint.power_cut import Medium, Tree, put, tree_of
from tests.forks import run

SHAPE = (4, 3)


def value(key: Key, iteration: int) -> torch.Tensor:
    """The content of the checkpoint of `iteration`."""
    return torch.arange(12.0).view(SHAPE) + 100 * iteration + len(key.kind)


KEYS = (Key("a"), Key("a", "exp_avg"), Key("b"))


def parts_of(context: ParallelContext, iteration: int) -> list[Part]:
    rows = SHAPE[0] // context.world_size
    box = Box((context.rank * rows, 0), (rows, SHAPE[1]))
    return [Part(key, SHAPE, box, value(key, iteration)[box.slices].clone()) for key in KEYS]


def save_all(saver: Saver, iterations: tuple[int, ...], on_visible: Callable[[int], None]) -> None:
    for iteration in iterations:
        for visible in saver.save(iteration, parts_of(saver.context, iteration), {"of": iteration}):
            on_visible(visible)
    while saver.unsettled:
        on_visible(saver.settle())
    saver.close()


def holds(folder: Path, iteration: int) -> None:
    reader = CheckpointReader(folder)
    assert reader.manifest.iteration == reader.facts["of"] == iteration
    assert set(reader.shapes) == set(KEYS)
    assert all(torch.equal(reader.tensor(key), value(key, iteration)) for key in KEYS)


@dataclass
class Scenario:
    """A folder and the checkpoints that are saved into it.

    Attributes:
        before, saved: iterations that the folder has, and iterations that are saved.
        ranks, retention, in_flight: the saver's.
        left: hidden states in which an earlier kill left the newest iteration of `before`.
    """

    before: tuple[int, ...]
    saved: tuple[int, ...]
    ranks: int = 1
    retention: Retention = field(default_factory=Retention)
    in_flight: int = 0
    left: tuple[str, ...] = ()

    def prepare(self, directory: Path) -> None:
        save_all(Saver(directory, solo_context(), FaultyDisk()), self.before, lambda iteration: None)
        newest = iteration_folder(directory, max(self.before))
        for state in self.left:
            shutil.copytree(newest, hidden_folder(directory, max(self.before), state))
        if "replaced" in self.left:
            shutil.rmtree(newest)

    def run(self, directory: Path, disks: list[FaultyDisk], stopper: StopAt) -> list[int]:
        """Save until the end or the stop; return the iterations that `save` reported visible."""
        visible: list[int] = []
        world, grid = ThreadWorld(self.ranks), ProcessGrid.factor(self.ranks)

        def work(rank: int) -> None:
            context = solo_context() if self.ranks == 1 else thread_context(world, grid, rank)
            saver = Saver(directory, context, disks[rank], self.retention, self.in_flight)
            try:
                save_all(saver, self.saved, visible.append)
            finally:
                saver.close()

        try:
            world.run(work)
        except (Stopped, CommunicationError):
            if not stopper.stopped:
                raise
        return visible


SCENARIOS = {
    "first": Scenario((), (10,)),
    "next": Scenario((10,), (20,)),
    "pruned": Scenario((5, 10), (20,), retention=Retention(last=1)),
    "replaced": Scenario((10, 20), (20,)),
    "only one replaced": Scenario((10,), (10,)),
    "in the background": Scenario((10,), (20, 30), in_flight=1, retention=Retention(last=2)),
    "two in flight": Scenario((), (10, 20, 30), in_flight=2),
    "after a kill": Scenario((10,), (20,), left=("partial", "replaced")),
    "two ranks": Scenario((10,), (20,), ranks=2),
    "two ranks in the background": Scenario((10,), (10,), ranks=2, in_flight=1),
}


def check(directory: Path, scenario: Scenario, returned: list[int]) -> None:
    """Check what a job that continues in the folder must be able to load and save."""
    known = {*scenario.before, *scenario.saved}
    assert set(saved_iterations(directory)) <= known
    for iteration in saved_iterations(directory):
        holds(iteration_folder(directory, iteration), iteration)  # what is visible is whole
    found = candidates(directory)
    newest = max([*scenario.before, *returned], default=None)
    if newest is None and not found.folders:
        assert not found.remarks
    else:
        best = CheckpointReader(found.folders[0]).manifest.iteration
        holds(found.folders[0], best)
        assert newest is None or best >= newest
        named = latest_iteration(directory)
        assert named is None or best == named, "latest must name what loads"
    following = max(known) + 1
    save_all(Saver(directory, solo_context(), FaultyDisk()), (following,), lambda iteration: None)
    assert latest_iteration(directory) == following
    holds(candidates(directory).folders[0], following)
    for iteration in saved_iterations(directory):
        holds(iteration_folder(directory, iteration), iteration)
    assert not [p.name for p in directory.iterdir() if p.name.startswith(".") and p.name != ".lock"]


@dataclass
class Sweep:
    """Runs a scenario repeatedly, stopped at another change each time."""

    scenario: Scenario
    folder: Path
    seen: set = field(default_factory=set)
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        base = self.folder / "base"
        base.mkdir()
        if self.scenario.before:
            self.scenario.prepare(base / "run")
        self.base = tree_of(base)

    def stop_at(self, rank: int, number: int, half: bool) -> str:
        """Stop one rank at a change, check all states that may be left, and return the change's name."""
        top = self._put(self.base)
        medium, stopper = Medium(top), StopAt(number, half)
        disks = [FaultyDisk(stopper if r == rank else None, medium) for r in range(self.scenario.ranks)]
        visible = self.scenario.run(top / "run", disks, stopper)
        really = tree_of(top)
        if "run" in really:
            really["run"].pop(LOCK, None)  # the one file that is not a `Disk`'s
            shown = medium.shown()
            shown["run"].pop(LOCK, None)
            assert shown == really, "the model must be right"
        for found in medium.found_after_cut():
            key = (repr(found), max(visible, default=0))
            if key in self.seen:
                continue
            self.seen.add(key)
            if "run" in found:
                check(self._put(found) / "run", self.scenario, visible)
            else:
                assert (visible, self.scenario.before) == ([], ())
        return stopper.stopped_at

    def _put(self, tree: Tree) -> Path:
        path = self.folder / str(next(self.numbers))
        put(tree, path)
        return path


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.fast] * (name == "two ranks")) for name in SCENARIOS]
)
def test_stopped_anywhere(tmp_path, name):
    sweep = Sweep(SCENARIOS[name], tmp_path)
    for rank in range(sweep.scenario.ranks):
        stops, more = [], True
        while more:
            more = sweep.stop_at(rank, len(stops), half=False)
            stops.append(more)
        assert {"create", "write", "sync"} <= set(stops)
        for number in (n for n, change in enumerate(stops) if change == "write"):
            sweep.stop_at(rank, number, half=True)
    assert len(sweep.seen) > 10


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize("points", [4, 12])
def test_kills_of_real_ranks(tmp_path, points):
    """Runs `proofs/kill_sweep.py` for one point of each layout, or three."""
    done = run(
        *("proofs/kill_sweep.py", "--points", points, "--jobs", 2),
        *("--folder", tmp_path / "sweep", "--output", tmp_path / "results.jsonl"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [result["number"] for result in results] == list(range(points))
    assert not any(result["problems"] for result in results)
    assert {result["variant"]["layout"] for result in results} == {"t2d2", "p2d2", "bert", "experts"}
    assert any(result["loaded"] for result in results)
