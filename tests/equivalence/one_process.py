"""A layout's training against that of one process, which layouts of the same model share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from itertools import product

import pytest

from megazero.verify.compare import compare
from megazero.verify.record import Record
from megazero.verify.run import run_alone
from tests.layouts.layout import Layout
from tests.layouts.selection import allowed


@cache
def serial(layout: Layout) -> Record:
    """What one process records for `Layout.serial`."""
    return run_alone(layout.config())


def in_order(layouts: list[Layout]) -> list[Layout]:
    """Brief forms of the layouts, one model's together: a worker gets neighbours, and trains it once."""
    return sorted((layout.brief for layout in layouts), key=lambda layout: str(layout.serial))


def check(records: list[Record], layout: Layout) -> None:
    """Fail with every deviation that is too large."""
    bad = [str(d) for d in compare(records, serial(layout.serial)) if d.share > 1]
    assert not bad, "\n".join(bad)


def parametrize(
    metafunc: pytest.Metafunc,
    everything: Callable[[], Iterable[Layout]],
    selection: Callable[[int], list[Layout]],
    counts: tuple[int, int],
    mark: pytest.MarkDecorator,
) -> None:
    """Give a test that takes `selected` the layouts that the command line asks for.

    Args:
        metafunc: of the test.
        everything: all layouts, allowed or not.
        selection: chooses so many of them.
        counts: how many are chosen by default, and with ``--slow``.
        mark: for some small ones, in which each setting has each of its values.
    """
    if "selected" in metafunc.fixturenames:
        options = metafunc.config.option
        layouts = filter(allowed, everything()) if options.all_layouts else selection(counts[options.slow])
        marked = set(representatives(selection(counts[0])))
        chosen = [pytest.param(x, marks=[mark] * (x in marked), id=x.name) for x in layouts]
        metafunc.parametrize("selected", chosen)


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
