"""The protocol of a monitor, and the composite that outlives its members' failures."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Protocol

from megazero.train.metrics import EvalMetrics, StepMetrics


class Monitor(Protocol):
    """Something that shows or records how training goes.

    All methods do nothing unless overridden, so a monitor that derives from this states what it cares
    for. A method raises OSError, naming its path, where it cannot write.
    """

    def step(self, metrics: StepMetrics) -> None:
        """One iteration is done."""

    def evaluation(self, metrics: EvalMetrics) -> None:
        """One evaluation is done."""

    def message(self, text: str) -> None:
        """Something to tell a person, such as a saved checkpoint."""

    def close(self) -> None:
        """Training is over; write out what is held back."""


class CompositeMonitor(Monitor):
    """Passes everything on to its members.

    A member that cannot write (a full disk, a closed terminal) is dropped with one warning that says
    why: losing a chart must not lose the training. Errors other than OSError are bugs and rise.

    Args:
        members: the monitors to call, in this order.
        warn: takes the warning; standard error by default.
    """

    def __init__(self, members: Iterable[Monitor] = (), warn: Callable[[str], None] | None = None) -> None:
        self.members = list(members)
        self._warn = warn or _print_to_stderr

    def step(self, metrics: StepMetrics) -> None:
        self._each(lambda member: member.step(metrics))

    def evaluation(self, metrics: EvalMetrics) -> None:
        self._each(lambda member: member.evaluation(metrics))

    def message(self, text: str) -> None:
        self._each(lambda member: member.message(text))

    def close(self) -> None:
        self._each(lambda member: member.close())

    def _each(self, call: Callable[[Monitor], None]) -> None:
        for member in list(self.members):
            try:
                call(member)
            except OSError as error:
                self.members.remove(member)
                self._warn(f"warning: {type(member).__name__} is off from here on: {error}")


def _print_to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
