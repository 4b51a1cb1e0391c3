"""`SpikeGuard`: checks steps for spikes and for numbers that are not finite."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from megazero.config.steps import Step
from megazero.config.tree.guards import GuardsConfig
from megazero.errors import NumericsError
from megazero.models.batch import MicroBatch
from megazero.train.guards.facts import step_facts
from megazero.train.guards.rerun import Cause, Ruling, repeat
from megazero.train.observe.incidents import Action, Incident, IncidentLog
from megazero.train.resume.load import Restore
from megazero.train.step.concern import CONTINUE, Concern, StepContext, Verdict, fail, go_back, go_on
from megazero.train.step.engine import Attempt, Engine, Outcome
from megazero.train.step.feed import Feed
from megazero.train.step.spikes import Recent, Spike
from megazero.train.step.state import TrainState
from megazero.train.step.timers import Timers


@dataclass
class _Seen:
    """The findings about one step.

    Attributes:
        spikes: values far above those of the latest updates.
        finite: whether loss and gradient norm were finite.
        ruling: the conclusion from repeating the step; None if it was not repeated.
        facts: facts of the step for the report.
    """

    spikes: Sequence[Spike] = ()
    finite: bool = True
    ruling: Ruling | None = None
    facts: Mapping[str, object] = field(default_factory=dict)

    @property
    def description(self) -> str:
        """The fault as text."""
        wrong = "; ".join(map(str, self.spikes)) if self.finite else "a number is inf or NaN"
        return wrong if self.ruling is None else f"{wrong}; {self.ruling.text}"


class SpikeGuard(Concern):
    """Checks each step before its update, and acts on faults. Every rank makes the same calls.

    Args:
        feed: the training samples; None if there are none.
        restore: goes back to a checkpoint; None if nothing is saved.
    """

    def __init__(
        self,
        config: GuardsConfig,
        engine: Engine,
        feed: Feed[MicroBatch] | None,
        log: IncidentLog,
        restore: Restore | None,
    ):
        self.config = config
        self.engine = engine
        self.feed = feed
        self.context = engine.context
        self.log = log
        self.restore = restore
        self._seen = _Seen()

    def passes_over(self, state: TrainState, step: Step) -> bool:
        """Whether to pass over the step: by `iterations_to_skip`, or for samples set aside by a rollback."""
        first, end = step.before.samples, step.after.samples
        aside = any(start < end and first < stop for start, stop in state.set_aside)
        return aside or step.before.iteration in self.config.iterations_to_skip

    @property
    def may_hold(self) -> bool:
        """Whether the guard may hold a step's update."""
        return self.config.rerun_on_fault or self.config.on_spike in ("skip", "rollback")

    def judge(
        self, now: TrainState, step: Step, attempt: Attempt, batches: Sequence[MicroBatch], timers: Timers
    ) -> tuple[Attempt, bool]:
        """Check the losses and the gradient norm of a step before its update; every rank calls this.

        `now` is the progress before the step, `batches` are this rank's micro-batches.

        Returns:
            The latest attempt, whose gradients the engine has, and whether to hold the update.
        """
        self._seen = _Seen()
        if attempt.losses.total is None:
            return attempt, False
        seen = self._look(now, attempt)
        if seen.finite and not seen.spikes:
            return attempt, False
        self._seen = seen
        # A dynamic loss scale finds its value by overflows, so inf is no fault then.
        if not seen.finite and self.engine.scaler.searches:
            return attempt, False
        if self.config.rerun_on_fault:
            replay = partial(self.engine.attempt, progress=step.before, timers=timers)
            attempt, seen.ruling = repeat(attempt, replay, batches, self._borrowed(step), self.context)
            if seen.ruling.cause is Cause.TRANSIENT:
                again = self._look(now, attempt)
                if again.finite and not again.spikes:
                    return attempt, False
        assert self.feed is not None, "a step has samples"
        seen.facts = step_facts(self.engine, self.feed, step, attempt, batches)
        return attempt, self._holds(seen)

    def after(self, now: StepContext) -> Verdict:
        """Record the step, and report its fault or go back to a checkpoint."""
        if now.result.outcome is Outcome.PASSED_OVER:
            return CONTINUE
        seen, state, result = self._seen, now.state, now.result
        recent, total = state.recent or Recent(), result.losses.total
        if not result.skipped and total is not None:
            recent = recent.after(total, result.grad_norm, self.config.spike_window)
        state = replace(state, recent=recent)
        if (seen.finite and not seen.spikes) or (not seen.finite and self.engine.scaler.searches):
            return go_on(state)
        self._seen = _Seen()
        if seen.ruling is not None and seen.ruling.cause is Cause.PERSISTENT:
            self._add("fault", state.iteration, seen, "stopped")
            return fail(
                NumericsError(f"iteration {state.iteration}: {seen.description}; replace it, and resume")
            )
        if seen.ruling is not None and seen.ruling.cause is Cause.TRANSIENT and not result.skipped:
            self._add("fault", state.iteration, seen, "went on")
            return go_on(state)
        return self._act(replace(now, state=state), seen)

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

    def _borrowed(self, step: Step) -> Sequence[MicroBatch] | None:
        """The next replica's micro-batches; None without another replica, or with expert parallelism."""
        data = self.context.data
        if self.feed is None or data.size == 1 or self.context.groups["ep"].size > 1:
            return None
        neighbour = self.feed.of_replica((data.rank + 1) % data.size)
        return neighbour.of_step(step)

    def _act(self, now: StepContext, seen: _Seen) -> Verdict:
        """Act on a spike, or on numbers that are not finite, as the settings say."""
        state, result = now.state, now.result
        iteration, kind = state.iteration, "spike" if seen.finite else "not finite"
        recent = state.recent or Recent()
        calm = recent.calm(iteration) and state.bad_in_a_row <= 1
        if result.outcome is Outcome.HELD and self.config.on_spike == "rollback":
            verdict = self._roll_back(state, now.step, seen, kind)
            if verdict is not None:
                return verdict
        if result.first_bad_parameter is not None:
            seen.facts = {**seen.facts, "first gradient that is not finite": result.first_bad_parameter}
        if calm:  # report only the first of several in a row
            self._add(kind, iteration, seen, "skipped" if result.skipped else "none")
        return go_on(replace(state, recent=replace(recent, spike=iteration)) if seen.finite else state)

    def _roll_back(self, state: TrainState, step: Step, seen: _Seen, kind: str) -> Verdict | None:
        """Go back to a checkpoint and set aside the samples around the step; None without a checkpoint."""
        earlier = self.restore() if self.restore is not None else None
        if earlier is None:
            return None
        end = step.after.samples
        start = max(earlier.consumed_samples, end - self.config.spike_steps * step.batch_size)
        aside = (*state.set_aside, (start, end))
        times = sum(begin >= earlier.consumed_samples for begin, _ in aside)
        if times > self.config.max_rollbacks:
            self._add(kind, state.iteration, seen, "stopped")
            return fail(
                NumericsError(
                    f"`max_rollbacks` is reached: {self.config.max_rollbacks} rollbacks to the checkpoint of "
                    f"iteration {earlier.iteration} did not help (iteration {state.iteration}: "
                    f"{seen.description}); lower the learning rate, or look at the data"
                )
            )
        self._add(kind, state.iteration, seen, "rolled back")
        return go_back(replace(earlier, set_aside=aside))

    def _add(self, kind: str, iteration: int, seen: _Seen, action: Action) -> None:
        ranks = seen.ruling.ranks if seen.ruling is not None else ()
        self.log.add(Incident(kind, iteration, seen.description, action, ranks, seen.facts))
