"""A job whose store stops answering at any request leaves whole checkpoints, or none that is visible.

Every scenario is stopped before each of its requests, and after each with its answer lost; and another host's
job takes the folder over before each. From a host that has no mirror, the newest checkpoint whose save had
returned, or the one under way, must be there bit for bit; the next job saves, and nothing is left of the one
that was killed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import pytest

from megazero.checkpoint.folder import Retention, candidates
from megazero.checkpoint.reader import CheckpointReader
from megazero.checkpoint.remote.index import INDEX, LATEST, read_index
from megazero.checkpoint.saver import Saver
from megazero.errors import CheckpointError, CommunicationError, LostFolderError
from megazero.mpu.context import solo_context, thread_context
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.thread_group import ThreadWorld
from megazero.storage.urls import Url
from tests.checkpoint.remote.memory import FailAt, MemoryObjects, StopAt, Store
from tests.checkpoint.test_killed import holds, parts_of, save_all

URL = "s3://bucket/run"
pytestmark = pytest.mark.filterwarnings("ignore:.*was last written by")


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
# The default suite stops at a few requests.
SWEEPS = [pytest.param(name, done, 1, marks=pytest.mark.slow) for name in SCENARIOS for done in (False, True)]
SWEEPS += [("pruned", False, 13), ("only one replaced", True, 17)]


def save(*iterations: int) -> None:
    save_all(Saver(URL, solo_context()), iterations, lambda iteration: None)


def check(store: Store, known: set[int], newest: int | None) -> None:
    """Check what another host sees and does after a job was killed: at least `newest` is there."""
    folders = candidates(URL).folders
    there = [CheckpointReader(folder).manifest.iteration for folder in folders]
    assert set(there) <= known
    for folder, iteration in zip(folders, there, strict=True):
        holds(folder, iteration)  # what is visible is whole
    assert newest is None or there[0] >= newest
    save(following := max(known) + 1)
    folders = candidates(URL).folders
    holds(folders[0], following)
    index, _ = read_index(MemoryObjects(Url("s3", "bucket", "run"), store))
    assert index is not None
    assert index.latest == following
    assert sorted(index.checkpoints) == sorted(folder.name for folder in folders)
    assert store.objects[f"run/{LATEST}"][0] == f"{following}\n".encode()
    places = [f"run/{data}/" for data in index.checkpoints.values()]
    kept = (*places, f"run/{INDEX}", f"run/{LATEST}")
    assert not [key for key in store.objects if not key.startswith(kept)]


@pytest.mark.parametrize(("name", "done", "stride"), SWEEPS)
def test_stopped_at_any_request(memory, another_host, name, done, stride):
    scenario, number, ended = SCENARIOS[name], 0, False
    if scenario.before:
        save(*scenario.before)
    base = dict(memory.objects)
    while not ended:
        another_host()
        memory.objects = dict(base)
        stop, visible = StopAt(memory, number, done), []
        try:
            scenario.run(visible.append)
        except (CheckpointError, CommunicationError):
            assert stop.stopped
        memory.quiet()
        ended = not stop.stopped
        another_host()
        known = {*scenario.before, *scenario.saved}
        check(memory, known, max([*scenario.before, *visible], default=None))
        number += stride
    assert number > 25


@pytest.mark.parametrize("done", [False, True])
@pytest.mark.parametrize("kinds", [("swap",), pytest.param(("",), marks=pytest.mark.slow)])
def test_any_request_fails_once(memory, another_host, done, kinds):
    """The save that it was for may be lost; what is visible is whole, and the next save succeeds."""
    save(5)
    base, number, ended = dict(memory.objects), 0, False
    while not ended:
        another_host()
        memory.objects = dict(base)
        saver, visible = Saver(URL, solo_context(), None, Retention(last=2)), []
        fault = FailAt(memory, number, done, kinds)
        for iteration in (10, 11):
            with contextlib.suppress(CheckpointError):
                visible += saver.save(iteration, parts_of(saver.context, iteration), {"of": iteration})
        memory.quiet()
        ended = not fault.failed
        saver.close()
        another_host()
        check(memory, {5, 10, 11}, max(visible, default=5))
        number += 1
    assert number > 3


@dataclass
class TakeOver:
    """Before the change `number` of what is visible, another host's job takes the folder, saves and ends."""

    memory: Store
    number: int
    move: Callable[[], object]
    back: Callable[[], None]
    count: int = 0
    taken: bool = False

    def __call__(self, request: str) -> None:
        self.count += request.startswith(("swap", "create run/latest"))
        if self.count <= self.number:
            return
        self.taken = True
        self.memory.quiet()
        self.move()
        save(20)
        self.back()


def test_another_host_takes_over_before_any_change(memory, another_host, monkeypatch):
    """The first job can make nothing visible from then on, and says so; the second one's are all whole."""
    number, ended = 0, False
    save(5)
    base = dict(memory.objects)
    while not ended:
        memory.objects = dict(base)
        first_host = str(another_host())
        saver, visible, lost = Saver(URL, solo_context()), [], False
        back = partial(monkeypatch.setenv, "XDG_CACHE_HOME", first_host)
        memory.before = other = TakeOver(memory, number, another_host, back)
        for iteration in (10, 11):
            try:
                visible += saver.save(iteration, parts_of(saver.context, iteration), {"of": iteration})
            except LostFolderError:
                lost = True
        memory.quiet()
        ended = not other.taken
        assert lost == other.taken
        saver.close()
        another_host()
        check(memory, {5, 10, 11, 20}, 20 if other.taken else 11)
        number += 1
    assert number > 4
