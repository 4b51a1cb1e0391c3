"""`EqualCopies`: compares copies of weights, masters and moments, and repairs them or rolls back."""

from __future__ import annotations

from collections.abc import Callable

from megazero.config.tree.guards import GuardsConfig
from megazero.errors import NumericsError
from megazero.train.observe.incidents import Action, Incident, IncidentLog
from megazero.train.resume.load import Restore
from megazero.train.step.concern import (
    CONTINUE,
    Concern,
    StepContext,
    Strength,
    Verdict,
    fail,
    failing,
    go_back,
)
from megazero.train.step.engine import Engine
from megazero.train.step.state import TrainState
from megazero.train.step.timers import Timers
from megazero.zero.copies import CopyCheck


class EqualCopies(Concern):
    """Compares copies before a checkpoint, at the end, and at an interval.

    Args:
        restore: goes back to a checkpoint; None if nothing is saved.
        wait_for_copies: waits until background saving has copied the state, which a repair changes.
    """

    def __init__(
        self,
        config: GuardsConfig,
        engine: Engine,
        log: IncidentLog,
        restore: Restore | None,
        wait_for_copies: Callable[[], None],
        timers: Timers,
    ):
        self.config = config
        self.engine = engine
        self.log = log
        self.restore = restore
        self.wait_for_copies = wait_for_copies
        self.timers = timers
        self._check = CopyCheck(engine.optimizer, engine.context)
        self._returns = 0  # number of rollbacks since copies were last equal

    def after(self, now: StepContext) -> Verdict:
        interval = self.config.check_weights_interval
        due = now.ends or now.verdict.strength >= Strength.SAVE or now.due(interval)
        if not interval or not due or failing(self.engine, now.state):
            return CONTINUE
        self.wait_for_copies()
        with self.timers("comparison of copies"):
            return self.compare(now.state)

    def compare(self, state: TrainState) -> Verdict:
        """Compare copies; if they differ, act as the settings say."""
        comparison = self._check.compare()
        if not comparison.differences:
            self._returns = 0
            return CONTINUE
        summary, choice = comparison.told(), self.config.on_weights_differ
        ranks = tuple(sorted({rank for difference in comparison.differences for rank in difference.accused}))
        facts = {"copies that differ": [str(difference) for difference in comparison.differences]}

        def add(action: Action) -> None:
            incident = Incident("weights differ", state.iteration, summary, action, ranks, facts)
            self.log.add(incident)

        if choice == "majority" and any(difference.others for difference in comparison.differences):
            self._check.repair(comparison.take_overs)
            if not self._check.compare().differences:
                add("repaired")
                return CONTINUE
        if choice == "checkpoint" and self._returns < self.config.max_rollbacks:
            earlier = self.restore() if self.restore is not None else None
            if earlier is not None:
                self._returns += 1
                add("rolled back")
                return go_back(earlier)
        add("stopped")
        return fail(
            NumericsError(
                f"copies must be equal on all ranks that hold them, but after iteration {state.iteration} "
                f"{summary}; earlier checkpoints are kept: resume from the last one, without the machine of "
                "these ranks if it happens again"
            )
        )
