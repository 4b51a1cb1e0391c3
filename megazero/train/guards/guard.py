"""`StepGuard`: watches each step of a run for spikes, numbers that are not finite, and copies that differ."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from megazero.config.guards import GuardsConfig
from megazero.config.steps import Step
from megazero.errors import NumericsError
from megazero.models import MicroBatch
from megazero.mpu import ParallelContext
from megazero.train.guards.facts import step_facts
from megazero.train.guards.incidents import Action, Incident, IncidentLog
from megazero.train.guards.rerun import Cause, Ruling, repeat
from megazero.train.step.engine import Attempt, Engine, Judge, Judgement, Replay, StepResult
from megazero.train.step.feed import Feed
from megazero.train.step.spikes import Recent, Spike
from megazero.train.step.state import TrainState
from megazero.zero import CopyCheck

_MOST_BAD = 5  # updates skipped in a row

Restore = Callable[[], TrainState | None]
"""Go back to the last healthy checkpoint and return its state, or None without one; every rank calls it."""


@dataclass
class _Seen:
    """The findings of a judge about one step.

    Attributes:
        spikes: values far above those of the latest updates.
        finite: whether loss and gradient norm were finite.
        ruling: the result of repeating the step; None if it was not repeated.
        facts: facts of the step, for the report.
    """

    spikes: Sequence[Spike] = ()
    finite: bool = True
    ruling: Ruling | None = None
    facts: Mapping[str, object] = field(default_factory=dict)

    @property
    def description(self) -> str:
        """The fault, as text."""
        wrong = "; ".join(map(str, self.spikes)) if self.finite else "a number is inf or NaN"
        return wrong if self.ruling is None else f"{wrong}; {self.ruling.text}"


class StepGuard:
    """Judges each step before its update, and acts on what it finds. Every rank makes the same calls.

    Args:
        config: the faults to look for, and what to do about each.
        engine: makes the steps.
        feed: gives their samples; None where nothing is trained on.
        context: all ranks.
        log: takes the incidents.
        restore: goes back to a checkpoint; None where nothing is saved.
    """

    def __init__(
        self,
        config: GuardsConfig,
        engine: Engine,
        feed: Feed[MicroBatch] | None,
        context: ParallelContext,
        log: IncidentLog,
        restore: Restore | None,
    ):
        self.config = config
        self.engine = engine
        self.feed = feed
        self.context = context
        self.log = log
        self.restore = restore
        self._copies = CopyCheck(engine.optimizer, context)
        self._seen = _Seen()
        self._returns = 0  # to checkpoints, since copies last were equal

    def passes_over(self, state: TrainState, step: Step) -> bool:
        """Whether to pass over the step: its iteration is to be skipped, or a sample of it is set aside."""
        first, end = step.before.samples, step.after.samples
        aside = any(start < end and first < stop for start, stop in state.set_aside)
        return aside or step.after.iteration in self.config.iterations_to_skip

    def judge(self, state: TrainState, step: Step, batches: Sequence[MicroBatch]) -> Judge:
        """Return the judge of the step after `state`, which looks at its losses and gradient norm."""
        self._seen = _Seen()
        feed = self.feed
        assert feed is not None, "a step is made of samples"

        def look(attempt: Attempt, replay: Replay) -> Judgement:
            seen = self._look(state, attempt)
            if seen.finite and not seen.spikes:
                return Judgement(attempt)
            self._seen = seen
            # In the search for a loss scale, inf is how the scale is found.
            if not seen.finite and self.engine.scaler.searches:
                return Judgement(attempt)
            if self.config.rerun_on_fault:
                attempt, seen.ruling = repeat(
                    attempt, replay, batches, self._borrowed(feed, step), self.context
                )
                if seen.ruling.cause is Cause.TRANSIENT:
                    now = self._look(state, attempt)
                    if now.finite and not now.spikes:
                        return Judgement(attempt)
            seen.facts = step_facts(self.engine, feed, step, attempt, batches, self.context)
            return Judgement(attempt, hold=self._holds(seen))

        return look

    def after(self, state: TrainState, step: Step, result: StepResult) -> TrainState:
        """Report and count a step, or go back to a checkpoint, and return the state to go on with.

        Raises:
            NumericsError: on every rank: a machine computes wrongly, or going back has not helped.
        """
        seen, iteration = self._seen, state.iteration
        recent, total = state.recent or Recent(), result.losses.total
        if not result.skipped and total is not None:
            recent = recent.after(total, result.grad_norm, self.config.spike_window)
        state = replace(state, recent=recent)
        if (seen.finite and not seen.spikes) or (not seen.finite and self.engine.scaler.searches):
            return state
        self._seen = _Seen()
        if seen.ruling is not None and seen.ruling.cause is Cause.PERSISTENT:
            self._add("fault", iteration, seen, "stopped")
            raise NumericsError(f"iteration {iteration}: {seen.description}; replace it, and resume")
        if seen.ruling is not None and seen.ruling.cause is Cause.TRANSIENT and not result.skipped:
            self._add("fault", iteration, seen, "went on")
            return state
        return self._act(state, step, result, seen)

    def check_copies(self, state: TrainState) -> TrainState:
        """Compare copies, and return the state to go on with, which is earlier if the run goes back.

        Raises:
            NumericsError: on every rank: copies differ, and are not or cannot be repaired.
        """
        comparison = self._copies.compare()
        if not comparison.differences:
            self._returns = 0
            return state
        summary, choice = comparison.told(), self.config.on_weights_differ
        ranks = tuple(sorted({rank for difference in comparison.differences for rank in difference.accused}))
        facts = {"copies that differ": [str(difference) for difference in comparison.differences]}

        def add(action: Action) -> None:
            incident = Incident("weights differ", state.iteration, summary, action, ranks, facts)
            self.log.add(incident)

        if choice == "majority" and any(difference.others for difference in comparison.differences):
            self._copies.repair(comparison.take_overs)
            if not self._copies.compare().differences:
                add("repaired")
                return state
        if choice == "checkpoint" and self._returns < self.config.max_rollbacks:
            earlier = self.restore() if self.restore is not None else None
            if earlier is not None:
                self._returns += 1
                add("rolled back")
                return earlier
        add("stopped")
        raise NumericsError(
            f"copies must be equal on all ranks that hold them, but after iteration {state.iteration} "
            f"{summary}; earlier checkpoints are kept: resume from the last one, without the machine of "
            "these ranks if it happens again"
        )

    def check_row(self, state: TrainState, result: StepResult) -> None:
        """Raise NumericsError, on every rank, if too many updates in a row were skipped."""
        limit: float | None = self.config.max_skipped_updates
        if limit is None:
            limit = math.inf if self.engine.scaler.searches and not result.held else _MOST_BAD
        if state.bad_in_a_row < limit:
            return
        if result.held:
            why, remedy = "loss or gradient norm was far above the latest ones", ""
        else:
            why, remedy = "a gradient was inf or NaN", ", or change the precision"
        count, iteration = state.bad_in_a_row, state.iteration
        skipped = f"{count} updates in a row were skipped up to iteration {iteration}, because {why}"
        self.log.add(Incident("row of skipped updates", iteration, skipped, "stopped"))
        raise NumericsError(
            f"`max_skipped_updates` is reached: {skipped}; earlier checkpoints are kept: lower the learning "
            f"rate, look at the data of these steps{remedy}"
        )

    def failing(self, state: TrainState) -> bool:
        """Whether steps keep being bad, apart from the search for a loss scale; nothing is saved then."""
        scaler, scaling = self.engine.scaler, self.engine.scaler_state
        return (scaling.overflows_at_floor if scaler.searches else state.bad_in_a_row) > 1

    def healthy(self, state: TrainState) -> bool:
        """Whether the guards know of nothing that is wrong with a run in this state."""
        calm = state.recent is None or state.recent.calm(state.iteration)
        searches, scaling = self.engine.scaler.searches, self.engine.scaler_state
        return calm and not (scaling.overflows_at_floor if searches else state.bad_in_a_row)

    def _look(self, state: TrainState, attempt: Attempt) -> _Seen:
        loss, norm = attempt.losses.trained_total, attempt.grad_norm
        if not (math.isfinite(loss) and math.isfinite(norm)):
            return _Seen(finite=self.context.device.type == "meta")
        if self.config.on_spike == "off" or state.recent is None:
            return _Seen()
        return _Seen(state.recent.spikes(loss, norm, self.config.spike_threshold))

    def _holds(self, seen: _Seen) -> bool:
        persistent = seen.ruling is not None and seen.ruling.cause is Cause.PERSISTENT
        return (
            persistent
            or self.config.on_spike == "rollback"
            or (bool(seen.spikes) and self.config.on_spike == "skip")
        )

    def _borrowed(self, feed: Feed[MicroBatch], step: Step) -> Sequence[MicroBatch] | None:
        """The next replica's micro-batches; None if there is none, or if ranks share work for experts."""
        data = self.context.data
        if data.size == 1 or self.context.groups["ep"].size > 1:
            return None
        neighbour = feed.of_replica((data.rank + 1) % data.size)
        return neighbour.of_step(step)

    def _act(self, state: TrainState, step: Step, result: StepResult, seen: _Seen) -> TrainState:
        """Do what the settings ask for about a spike, or about numbers that are not finite."""
        iteration, kind = state.iteration, "spike" if seen.finite else "not finite"
        recent = state.recent or Recent()
        calm = recent.calm(iteration) and state.bad_in_a_row <= 1
        if result.held and self.config.on_spike == "rollback":
            earlier = self._roll_back(state, step, seen, kind)
            if earlier is not None:
                return earlier
        if result.first_bad_parameter is not None:
            seen.facts = {**seen.facts, "first gradient that is not finite": result.first_bad_parameter}
        if calm:  # of several in a row, only the first is reported
            self._add(kind, iteration, seen, "skipped" if result.skipped else "none")
        if not seen.finite:
            return state
        return replace(state, recent=replace(recent, spike=iteration))

    def _roll_back(self, state: TrainState, step: Step, seen: _Seen, kind: str) -> TrainState | None:
        """Go back, set aside the samples around the step, and return the state; None without a checkpoint."""
        earlier = self.restore() if self.restore is not None else None
        if earlier is None:
            return None
        end = step.after.samples
        start = max(earlier.consumed_samples, end - self.config.spike_steps * step.batch_size)
        aside = (*state.set_aside, (start, end))
        times = sum(begin >= earlier.consumed_samples for begin, _ in aside)
        if times > self.config.max_rollbacks:
            self._add(kind, state.iteration, seen, "stopped")
            raise NumericsError(
                f"`max_rollbacks` is reached: {self.config.max_rollbacks} rollbacks to the checkpoint of "
                f"iteration {earlier.iteration} did not help (iteration {state.iteration}: "
                f"{seen.description}); lower the learning rate, or look at the data"
            )
        self._add(kind, state.iteration, seen, "rolled back")
        return replace(earlier, set_aside=aside)

    def _add(self, kind: str, iteration: int, seen: _Seen, action: Action) -> None:
        ranks = seen.ruling.ranks if seen.ruling is not None else ()
        self.log.add(Incident(kind, iteration, seen.description, action, ranks, seen.facts))
