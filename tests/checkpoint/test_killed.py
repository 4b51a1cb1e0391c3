"""A save that is stopped at any change of the file system, or by a power cut there, leaves whole checkpoints.

Every scenario is stopped before each of its changes, and within each write. What is on the disk then, and all that
a power cut may leave of it, must hold the newest checkpoint whose save had returned or the one under way, bit for
bit; what ``latest`` names must load; and the next job clears what was left and saves.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from megazero.checkpoint import Box, CheckpointReader, Key, Part, Retention, Saver, candidates, latest_iteration
from megazero.checkpoint.folder import LATEST, hidden_folder, iteration_folder, saved_iterations
from megazero.errors import CommunicationError
from megazero.mpu import ParallelContext, ProcessGrid, ThreadWorld, solo_context, thread_context
from tests.checkpoint.faulty_disk import Counter, FaultyDisk, Medium, StopAt, Stopped, put

SHAPE = (4, 3)


def value(key: Key, iteration: int) -> torch.Tensor:
    """What a checkpoint of `iteration` holds."""
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
    """What is saved over what."""

    before: tuple[int, ...]
    saved: tuple[int, ...]
    ranks: int = 1
    retention: Retention = field(default_factory=Retention)
    in_flight: int = 0

    def prepare(self, directory: Path) -> None:
        save_all(Saver(directory, solo_context(), FaultyDisk()), self.before, lambda iteration: None)

    def run(self, directory: Path, disks: list[FaultyDisk]) -> list[int]:
        """Save until the end or the stop; the iterations that became visible to their callers."""
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
        except (Stopped, CommunicationError) as error:
            assert any(disk.fault.stopped for disk in disks), error
        return visible


SCENARIOS = {
    "first": Scenario((), (10,)),
    "next": Scenario((10,), (20,)),
    "pruned": Scenario((5, 10), (20,), retention=Retention(last=1)),
    "replaced": Scenario((10, 20), (20,)),
    "only one replaced": Scenario((10,), (10,)),
    "in the background": Scenario((10,), (20, 30), in_flight=1, retention=Retention(last=2)),
    "two in flight": Scenario((), (10, 20, 30), in_flight=2),
    "two ranks": Scenario((10,), (20,), ranks=2),
    "two ranks in the background": Scenario((10,), (10, 20), ranks=2, in_flight=1, retention=Retention(last=1)),
}


def check(directory: Path, scenario: Scenario, returned: list[int]) -> None:
    """What a job that continues here must find, and can do."""
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


@pytest.mark.parametrize("name", SCENARIOS)
def test_stopped_anywhere(tmp_path, name):
    scenario = SCENARIOS[name]
    numbers = itertools.count()
    base = tmp_path / "base"
    base.mkdir()
    if scenario.before:
        scenario.prepare(base / "run")
    start = Medium(base).found_after_cut
    (tree,) = start()

    def attempt(rank: int, number: int, half: bool) -> StopAt:
        top = tmp_path / f"try{next(numbers)}"
        put(tree, top)
        medium = Medium(top)
        stopper, others = StopAt(number, half), StopAt(number=-1)
        others.number = 1 << 30
        disks = [FaultyDisk(stopper if r == rank else others, medium) for r in range(scenario.ranks)]
        returned = scenario.run(top / "run", disks)
        for found in medium.found_after_cut():
            key = (repr(found), max(returned, default=0))
            if key in seen:
                continue
            seen.add(key)
            after = tmp_path / f"cut{next(numbers)}"
            put(found, after)
            if "run" in found:
                check(after / "run", scenario, returned)
            else:
                assert not returned and not scenario.before
        if (top / "run").exists():
            check(top / "run", scenario, returned)
        return stopper

    seen: set = set()
    for rank, half in itertools.product(range(scenario.ranks), (False, True)):
        stops = 0
        while attempt(rank, stops, half).stopped:
            stops += 1
        assert stops > 5
    assert len(seen) > 10
