"""A layout's training against that of one process, which layouts of the same model share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice, product

import pytest

from megazero.config.tree.config import Config
from megazero.verify.compare import compare
from megazero.verify.record import STEPS, Record
from megazero.verify.run import run_alone, run_in_threads, run_in_world
from tests.layouts.layout import Layout
from tests.layouts.selection import allowed, covering, with_methods, with_stores
from tests.pool import WorkerPool

_FAST = 2
"""Layouts of a sweep that the fast tier trains."""


@cache
def serial(layout: Layout, steps: int = STEPS) -> Record:
    """What one process records for `Layout.serial`."""
    return run_alone(layout.config(), steps)


def in_order(layouts: list[Layout]) -> list[Layout]:
    """Brief forms of the layouts, one model's together: a worker gets neighbours, and trains it once."""
    return sorted((layout.brief for layout in layouts), key=lambda layout: str(layout.serial))


def check(records: list[Record], layout: Layout, steps: int = STEPS) -> None:
    """Fail with every deviation that is too large."""
    bad = [str(d) for d in compare(records, serial(layout.serial, steps)) if d.share > 1]
    assert not bad, "\n".join(bad)


def check_as_threads(layout: Layout, config: Config | None = None) -> None:
    """Train a layout with a thread for each rank, and fail with every deviation that is too large.

    Methods take effect within five steps. Without one, three show all that there is: the second update is the
    first that finds moments, and the third loss is the first to show it.

    Args:
        layout: the layout.
        config: what it trains by, where that is not its own.
    """
    steps = STEPS if layout.method else 3
    check(run_in_threads(config or layout.config(), layout.grid, steps), layout, steps)


def check_as_processes(pool: WorkerPool, layout: Layout) -> None:
    """Train a layout with a process of `pool` for each rank, and fail with every deviation too large."""
    check(pool.run(run_in_world, layout.world_size, layout.config(), layout.grid), layout)


@dataclass(frozen=True)
class Sweep:
    """Layouts of one kind, of which a module trains some by default, and more with ``--slow``.

    Attributes:
        of: gives all of them, allowed or not.
        few, many: how many are trained by default, and with ``--slow``.
        every: one in so many also trains by a method; 0: none does.
        few_ranks: the number of ranks that the choice prefers.
    """

    of: Callable[[], Iterable[Layout]]
    few: int
    many: int
    every: int = 2
    few_ranks: int = 4

    def everything(self) -> list[Layout]:
        """All of them, allowed or not."""
        return _everything(self.of)

    def selection(self, count: int) -> list[Layout]:
        """`count` of those that are chosen, with stores and methods."""
        return _selection(self, count)

    def parametrize(self, metafunc: pytest.Metafunc) -> None:
        """Give a test that takes `selected` the layouts that the command line asks for.

        A few small ones, in which settings have as many of their values as fit, are marked as fast.
        """
        if "selected" in metafunc.fixturenames:
            options = metafunc.config.option
            count = self.many if options.slow else self.few
            layouts = filter(allowed, self.everything()) if options.all_layouts else self.selection(count)
            marked = set(representatives(self.selection(self.few))[:_FAST])
            chosen = [pytest.param(x, marks=[pytest.mark.fast] * (x in marked), id=x.name) for x in layouts]
            metafunc.parametrize("selected", chosen)

    def holds_every_pair(
        self, names: Iterable[str], others: Iterable[str] | None = None, *, least: int, slow: bool = False
    ) -> None:
        """Assert that the selections are whole, and that every pair of settings that may meet does.

        Args:
            names: settings.
            others: the settings that each of them meets; by default the same.
            least: the number of layouts that the larger selection must have.
            slow: whether they meet in the larger selection alone.
        """
        few, many = self.selection(self.few), self.selection(self.many)
        assert len(few) == len(set(few)) == self.few
        assert len(many) == len(set(many)) == self.many >= least
        assert set(few) < set(many)
        names = list(names)
        pairs = (names, names if others is None else others)
        assert pairs_met(many if slow else few, *pairs) == pairs_met(self.everything(), *pairs, allowed)

    def few_have(self, expected: Mapping[str, set]) -> None:
        """Assert that settings have exactly these values in the default selection."""
        few = self.selection(self.few)
        for name, values in expected.items():
            assert {getattr(layout, name) for layout in few} == values, name


@cache
def _everything(of: Callable[[], Iterable[Layout]]) -> list[Layout]:
    return list(of())


@cache
def _selection(sweep: Sweep, count: int) -> list[Layout]:
    choice = covering(sweep.everything(), sweep.many, few_ranks=sweep.few_ranks, allowed=allowed)
    chosen = list(islice(choice, count))
    return in_order(with_stores(with_methods(chosen, every=sweep.every) if sweep.every else chosen))


def representatives(layouts: Sequence[Layout], most_ranks: int = 4) -> list[Layout]:
    """A few layouts of so many ranks in which each setting has each value that it has in any of these."""
    small = [layout for layout in layouts if layout.world_size <= most_ranks]
    values = {layout: set(vars(replace(layout, samples=0)).items()) for layout in small}
    wanted, chosen = set().union(*values.values()), []
    while wanted:
        best = max(small, key=lambda layout: len(values[layout] & wanted) / layout.world_size)
        chosen.append(best)
        wanted -= values[best]
    return chosen


def pairs_met(
    layouts: Iterable[Layout],
    names: Iterable[str],
    others: Iterable[str],
    allowed: Callable[[Layout], bool] = lambda layout: True,
) -> set[tuple[tuple[str, object], tuple[str, object]]]:
    """The pairs of values, one of `names` and one of `others`, that meet in a layout that is allowed."""
    met: set = set()
    for layout in layouts:
        values = [[(name, getattr(layout, name)) for name in which] for which in (names, others)]
        pairs = set(product(*values))
        if not pairs <= met and allowed(layout):
            met |= pairs
    return met


def assert_holds_all(layouts: Sequence[Layout]) -> None:
    """The layouts, which are some of all sweeps', have every value of these settings."""
    expected = {
        "tp": {1, 2, 4},
        "pp": {1, 2, 4},
        "dp": {1, 2},
        "ep": {1, 2},
        "schedule": {"gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"},
        "zero": {0, 1, 2, 3},
        "sequence_parallel": {False, True},
        "recompute": {"none", "full", "selective"},
        "micro_batch": {1, 2},
        "shape": {"gpt2", "llama", "bert", "bert-original"},
    }
    for name, values in expected.items():
        assert values <= {getattr(layout, name) for layout in layouts}, name
