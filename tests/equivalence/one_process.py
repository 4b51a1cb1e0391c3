"""A layout's training against that of one process, which layouts of the same model share."""

from __future__ import annotations

from functools import cache

from megazero.verify.compare import compare
from megazero.verify.layouts import Layout
from megazero.verify.record import Record
from megazero.verify.run import run_alone


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
