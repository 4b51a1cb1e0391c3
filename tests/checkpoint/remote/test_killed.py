"""A job whose store stops answering at any request leaves whole checkpoints, or none that is visible.

Every scenario is stopped before each of its requests, and after each with its answer lost. From a host that
has no mirror, the newest checkpoint whose save had returned, or the one under way, must be there bit for bit;
the next job saves, and nothing is left of the one that was killed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from megazero.checkpoint.folder import Retention, candidates
from megazero.checkpoint.reader import CheckpointReader
from megazero.checkpoint.remote.index import INDEX, LATEST
from megazero.checkpoint.saver import Saver
from megazero.errors import CheckpointError, CommunicationError, LostFolderError
from megazero.mpu.context import solo_context, thread_context
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.thread_group import ThreadWorld
from tests.checkpoint.remote.memory import MemoryObjects, StopAt, Store
from tests.checkpoint.test_killed import holds, save_all

URL = "s3://bucket/run"


@dataclass
class Scenario:
    """The iterations that a folder has, and those that are saved by some ranks."""

    before: tuple[int, ...]
    saved: tuple[int, ...]
    ranks: int = 1
    retention: Retention = field(default_factory=Retention)
    in_flight: int = 0

    def run(self, on_visible: Callable[[int], None]) -> None:
        world, grid = ThreadWorld(self.ranks), ProcessGrid.factor(self.ranks)

        def work(rank: int) -> None:
            context = solo_context() if self.ranks == 1 else thread_context(world, grid, rank)
            saver = Saver(URL, context, None, self.retention, self.in_flight)
            try:
                save_all(saver, self.saved, on_visible)
            finally:
                saver.close()

        world.run(work)


SCENARIOS = {
    "first": Scenario((), (10,)),
    "pruned": Scenario((5, 10), (20,), retention=Retention(last=1)),
    "replaced": Scenario((10, 20), (20,)),
    "only one replaced": Scenario((10,), (10,)),
    "in the background": Scenario((10,), (20, 30), in_flight=1, retention=Retention(last=2)),
    "two ranks": Scenario((10,), (10,), ranks=2),
}


def check(store: Store, scenario: Scenario, returned: list[int]) -> None:
    """Check what another host sees and does after a job was killed."""
    known = {*scenario.before, *scenario.saved}
    folders = candidates(URL).folders
    there = [CheckpointReader(folder).manifest.iteration for folder in folders]
    assert set(there) <= known
    for folder, iteration in zip(folders, there, strict=True):
        holds(folder, iteration)  # what is visible is whole
    newest = max([*scenario.before, *returned], default=None)
    assert newest is None or there[0] >= newest
    following = max(known) + 1
    save_all(Saver(URL, solo_context()), (following,), lambda iteration: None)
    folders = candidates(URL).folders
    holds(folders[0], following)
    index = MemoryObjects_index(store)
    assert store.objects[f"run/{LATEST}"][0] == f"{following}\n".encode()
    places = tuple(f"run/{data}/" for data in index.checkpoints.values())
    left = [key for key in store.objects if not key.startswith((*places, f"run/{INDEX}", f"run/{LATEST}"))]
    assert not left
    assert len(index.checkpoints) == len(folders)


def MemoryObjects_index(store: Store):
    from megazero.checkpoint.remote.index import read_index
    from megazero.storage.urls import Url

    index, _ = read_index(MemoryObjects(Url("s3", "bucket", "run"), store))
    assert index is not None
    return index


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize("done", [False, True])
@pytest.mark.filterwarnings("ignore:.*was last written by")
def test_stopped_at_any_request(memory, another_host, name, done):
    scenario, base = SCENARIOS[name], Store()
    if scenario.before:
        save_all(Saver(URL, solo_context()), scenario.before, lambda iteration: None)
    base.objects = dict(memory.objects)
    number, ended = 0, False
    while not ended:
        another_host()
        memory.objects = dict(base.objects)
        stop, visible = StopAt(memory, number, done), []
        try:
            scenario.run(visible.append)
        except (CheckpointError, CommunicationError):
            assert stop.stopped
        memory.before = memory.after = lambda request: None
        ended = not stop.stopped
        another_host()
        check(memory, scenario, visible)
        number += 1
    assert number > 25
