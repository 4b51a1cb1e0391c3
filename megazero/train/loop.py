"""The training loop: a step, then all concerns of the run; the strongest of their verdicts decides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from megazero.config.steps import Step
from megazero.data.changing.start import blend_file
from megazero.models.batch import MicroBatch
from megazero.train.guards.blends import BlendEdits
from megazero.train.guards.concerns import DataUnchanged, ExitRequests, SkippedRow, SlowRankReports
from megazero.train.guards.copies import EqualCopies
from megazero.train.guards.spike_guard import SpikeGuard
from megazero.train.observe.evaluation import PeriodicEvaluation
from megazero.train.observe.incidents import FailureLog, Incident, IncidentLog
from megazero.train.observe.meters import Meters, StepFacts
from megazero.train.observe.metrics import StepMetrics
from megazero.train.observe.monitors.base import Monitor
from megazero.train.observe.news.webhook import Webhook
from megazero.train.resume.load import restore_last
from megazero.train.resume.saving import Saving
from megazero.train.resume.snapshot import Snapshots
from megazero.train.step.concern import (
    CONTINUE,
    Concern,
    JointConcerns,
    SharedConcern,
    StepContext,
    Strength,
    Verdict,
)
from megazero.train.step.engine import Outcome, StepResult
from megazero.train.step.feed import Feeds
from megazero.train.step.stability import Stability
from megazero.train.step.state import TrainState


class Loop:
    """Runs a training until its end, or until a concern stops it.

    Args:
        meters: measures the steps; has the run's configuration, plan and engine.
        snapshots: saves the run; None if nothing is saved.
    """

    def __init__(
        self,
        meters: Meters,
        feeds: Feeds,
        monitor: Monitor,
        snapshots: Snapshots | None,
        evaluations: PeriodicEvaluation,
    ):
        config, engine, plan = meters.config, meters.engine, meters.plan
        context, guards, interval = engine.context, config.guards, config.logging.log_interval
        self.meters = meters
        self.feed = feeds.train
        self.monitor = monitor
        self.evaluations = evaluations
        self.exits = ExitRequests(config.training)
        self.saving: Saving | None = None
        folder = restore = None
        note = partial(Snapshots.note, snapshots) if snapshots is not None else lambda facts: None
        if snapshots is not None:
            self.saving = Saving(snapshots, config.checkpoint.save_interval, monitor, meters.timers)
            folder, restore = Path(snapshots.saver.directory), partial(restore_last, snapshots)
        self.webhook = Webhook(config.logging.notify, folder)
        log = IncidentLog(monitor, None)
        if context.rank == 0:
            log = IncidentLog(monitor, folder, partial(self.webhook.tell, "incident"))
        self.failures = FailureLog(folder, partial(self.webhook.tell, "failure"))
        if context.watch is not None:
            context.watch.listener = self.failures.note
        self.guard = SpikeGuard(guards, engine, self.feed, log, restore)
        intervals = (interval, self.exits.interval, plan.evaluations.interval)
        saving: tuple[Saving, ...] = () if self.saving is None else (self.saving,)
        shared: tuple[SharedConcern, ...] = (
            SlowRankReports(meters.stragglers, log),
            DataUnchanged(feeds, engine, intervals, lambda: self.exits.asked),
            BlendEdits(self.feed, blend_file(config), context, monitor, interval, note),
            *saving,
            self.exits,
        )
        # The guard, which may go back to an earlier state, comes before concerns that look at the state; the
        # comparison of copies comes after concerns that decide whether to save it.
        self.concerns: tuple[Concern, ...] = (
            self.guard,
            SkippedRow(guards, engine, log),
            evaluations,
            *saving,
            JointConcerns(shared, context),
            EqualCopies(guards, engine, log, restore, self._wait_for_copies, meters.timers),
        )

    def fit(self, state: TrainState) -> TrainState:
        """Train from `state` on and return the final state. SIGTERM saves and ends the training early.

        Raises:
            CheckpointError: on every rank: the last checkpoint cannot be written.
            LostFolderError: on every rank: another job has taken the folder.
            NumericsError: on every rank: too many updates in a row were skipped, copies differ, a machine
                computes wrongly, or a checkpoint would have a number that is not finite. Earlier checkpoints
                stay.
            DataError: on every rank: a file of the data has changed since the run began.
        """
        self._stands_at(state)
        verdict, end, context = CONTINUE, self.meters.plan.end.iteration, self.meters.engine.context
        notices = self.webhook.over_run(lambda: self.failures.reached, alone=context.world.size == 1)
        with self.exits.signals, notices:
            while state.iteration < end and verdict.strength < Strength.STOP:
                verdict, state = self._judged(self._step(state))
                if verdict.strength is Strength.GO_BACK:
                    self.monitor.rewound(state.progress)
                    self._stands_at(state)
                    verdict = CONTINUE
                elif verdict.strength is Strength.SAVE and self.saving is not None:
                    self.saving.save(state)
            self.monitor.trained()
            if self.saving is not None:
                self.saving.save_last(state)  # a second signal does not interrupt this
        early = verdict.strength is Strength.STOP
        if early:
            self.monitor.message(f"stopping after iteration {state.iteration}: {verdict.reason}")
        else:
            self.evaluations.at_the_end(state)
        how = f"early: {verdict.reason}" if early else "it is complete"
        if context.rank == 0:
            self.webhook.tell("end", Incident("training ended", state.iteration, how, "none"))
        return state

    def _step(self, state: TrainState) -> StepContext:
        """Make the next step, or pass it over, which only consumes its samples."""
        with self.meters.profiler.over_step(state.iteration + 1):
            return self._next(state)

    def _next(self, state: TrainState) -> StepContext:
        meters, self.failures.reached = self.meters, state.iteration + 1
        meters.begin()
        step = meters.plan.at(state.progress)
        if self.guard.passes_over(state, step):
            result = meters.engine.nothing(state.updated)
        else:
            assert self.feed is not None, "there are no samples for training"
            with meters.timers("data"):
                batches = self.feed.of_step(step)
            with meters.over_work():
                result = self._made(state, step, batches)
        outcome = result.outcome
        bad = outcome in (Outcome.NOT_FINITE, Outcome.HELD)
        state = state.after(step, result.skipped, self._stability(state, result), bad=bad)
        metrics = StepMetrics.of(StepFacts(meters, state, step, result))
        self.monitor.step(metrics)
        made = outcome is not Outcome.PASSED_OVER
        meters.end(metrics["phase_seconds"].get("data", 0.0), made=made)
        return StepContext(state, step, result, ends=state.iteration >= meters.plan.end.iteration)

    def _made(self, state: TrainState, step: Step, batches: Sequence[MicroBatch]) -> StepResult:
        engine, timers = self.meters.engine, self.meters.timers
        attempt = engine.attempt(batches, step.before, timers)
        with timers("optimizer"):
            self._wait_for_copies()
            if not self.guard.may_hold:
                engine.queue_update(attempt, state.updated)
        attempt, hold = self.guard.judge(state, step, attempt, batches, timers)
        return engine.update(attempt, state.updated, timers, hold=hold)

    def _stability(self, state: TrainState, result: StepResult) -> Stability | None:
        """The stability statistics after this step, the same on every rank."""
        window = self.meters.config.logging.log_stability
        if result.outcome is Outcome.PASSED_OVER:
            return state.stability
        if window is None:
            return None
        known = state.stability or Stability()
        if result.skipped:
            return known
        return known.after(result.losses.trained_total, result.grad_norm, window)

    def _judged(self, now: StepContext) -> tuple[Verdict, TrainState]:
        """Run all concerns; return the strongest verdict and the state to continue with."""
        verdict = Verdict(state=now.state)
        for concern in self.concerns:
            now = replace(now, state=verdict.state or now.state, verdict=verdict)
            verdict = verdict.or_stronger(concern.after(now))
            if verdict.strength >= Strength.GO_BACK:
                break
        if verdict.error is not None:
            if self.saving is not None:
                self.saving.settle()
            raise verdict.error
        watch = self.meters.engine.context.watch
        if watch is not None:
            watch.under_way()
        return verdict, verdict.state or now.state

    def _stands_at(self, state: TrainState) -> None:
        for concern in self.concerns:
            concern.stands_at(state)

    def _wait_for_copies(self) -> None:
        """Wait until background saving has copied the engine's state, which is about to change."""
        if self.saving is not None:
            self.saving.saver.wait_for_copies()
