"""`Monitor`, and a composite that survives its members' failures."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable

from megazero.config.steps import Progress
from megazero.errors import printable
from megazero.train.observe.metrics import EvalMetrics, StepMetrics


class Monitor:
    """Shows or records the progress of a training. Methods do nothing unless overridden.

    A method that cannot write raises OSError with the path.
    """

    def step(self, metrics: StepMetrics) -> None:
        """Record the metrics of one iteration."""

    def evaluation(self, metrics: EvalMetrics) -> None:
        """Record the metrics of one evaluation."""

    def message(self, text: str) -> None:
        """Show a message, such as that a checkpoint was saved."""

    def rewound(self, progress: Progress) -> None:
        """Forget everything after `progress`, from which training continues."""

    def trained(self) -> None:
        """Show pending metrics after the last step; checkpoints and evaluations may follow."""

    def close(self) -> None:
        """Write everything pending at the end of the run."""


class CompositeMonitor(Monitor):
    """Calls several monitors.

    A member that cannot write (a full disk, a closed terminal) is dropped with a warning: a lost chart
    must not end a training. Errors other than OSError are bugs and are raised.

    Args:
        members: the monitors to call, in this order.
        warn: receives the warning; by default it is printed to standard error.
    """

    def __init__(self, members: Iterable[Monitor] = (), warn: Callable[[str], None] | None = None) -> None:
        self.members = list(members)
        self._warn = warn or (lambda text: print(text, file=sys.stderr, flush=True))

    def step(self, metrics: StepMetrics) -> None:
        self._each(lambda member: member.step(metrics))

    def evaluation(self, metrics: EvalMetrics) -> None:
        self._each(lambda member: member.evaluation(metrics))

    def message(self, text: str) -> None:
        self._each(lambda member: member.message(printable(text)))

    def rewound(self, progress: Progress) -> None:
        self._each(lambda member: member.rewound(progress))

    def trained(self) -> None:
        self._each(lambda member: member.trained())

    def close(self) -> None:
        self._each(lambda member: member.close())

    def _each(self, call: Callable[[Monitor], None]) -> None:
        for member in list(self.members):
            try:
                call(member)
            except OSError as error:
                self.members.remove(member)
                self._warn(f"warning: {type(member).__name__} is off from here on: {error}")
