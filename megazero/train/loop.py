"""The training loop: steps, evaluations, saves, and the reasons to stop."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch

from megazero.config.steps import Step
from megazero.errors import CheckpointError, DataError, LostFolderError, NumericsError
from megazero.models import MicroBatch
from megazero.mpu import JobFailure, ParallelContext, Waits, gather_values
from megazero.train.guards.guard import StepGuard
from megazero.train.guards.incidents import Incident, IncidentLog
from megazero.train.observe.memory import MemoryMeter
from megazero.train.observe.metrics import EvalMetrics, StepExtras, StepMetrics, step_metrics
from megazero.train.observe.monitors import CompositeMonitor, Monitor
from megazero.train.observe.step_waits import StepWaits
from megazero.train.observe.stragglers import Straggler, Stragglers
from megazero.train.process import StopRequest
from megazero.train.resume.rollback import go_back
from megazero.train.resume.snapshot import Snapshots
from megazero.train.run_plan import RunPlan
from megazero.train.step.engine import Engine, StepResult
from megazero.train.step.feed import Feeds
from megazero.train.step.stability import Stability
from megazero.train.step.state import TrainState
from megazero.train.step.timers import Timers
from megazero.zero import offloaded_bytes, traffic

_SHOWN = 3  # changed files in a message


class Loop:
    """Runs a training until its end or until there is a reason to stop.

    Args:
        engine: makes the steps.
        plan: how many steps to make, and what happens between them.
        feeds: samples of each split.
        monitor: receives all metrics and messages.
        checkpoints: saves the run; None if nothing is to be saved.
        context: the ranks that agree on when to stop.
    """

    def __init__(
        self,
        engine: Engine,
        plan: RunPlan,
        feeds: Feeds,
        monitor: Monitor,
        checkpoints: Snapshots | None,
        context: ParallelContext,
    ):
        self.engine = engine
        self.plan = plan
        self.feeds = feeds
        self.monitor = monitor
        self.checkpoints = checkpoints
        self.context = context
        self._saved_at = 0
        self.timers = Timers(context.device, synchronize=plan.exact_timers)
        self.waits = Waits(context.device) if context.watch is None else context.watch.waits
        self.host_waits = StepWaits(plan.guards.check_host_waits, context.device, monitor.message)
        self.stragglers = Stragglers(plan.straggler_interval, context)
        self._offloads = bool(offloaded_bytes(engine.optimizer.store))
        self._reached = 0
        self._memory = MemoryMeter.of(engine) if plan.measures_memory else None
        self._folder = None if checkpoints is None else Path(checkpoints.saver.directory)
        self.incidents = IncidentLog(monitor, self._folder if context.rank == 0 else None)
        if context.watch is not None:
            context.watch.listener = self._note_failure
        self.guard = StepGuard(
            plan.guards,
            engine,
            feeds.train,
            context,
            self.incidents,
            None if checkpoints is None else partial(go_back, checkpoints),
        )

    def fit(self, state: TrainState) -> TrainState:
        """Train from `state` on and return the state at the end. SIGTERM saves and ends the training early.

        A checkpoint that cannot be written along the way is reported, and training continues. None is written
        while steps are skipped because gradients are not finite: one that is due waits for the next update.

        Raises:
            CheckpointError: on every rank, if the last checkpoint cannot be written.
            LostFolderError: on every rank, if another job has taken the folder in the meantime.
            NumericsError: on every rank: too many updates in a row were skipped, copies differ, a machine
                computes wrongly, or a checkpoint would hold a number that is not finite. Earlier checkpoints
                stay.
            DataError: on every rank: a file of the data is not what it was when the run began. This is looked
                at before each save, with evaluations, and every `RunPlan.log_interval` iterations.
        """
        started = time.monotonic()
        self._saved_at = evaluated_at = state.iteration
        reason, due = None, False
        with StopRequest() as stop:
            while state.iteration < self.plan.training_plan.end.iteration and reason is None:
                done = state.iteration
                state = self._step(state)
                if state.iteration > done:
                    interval = self.plan.training_plan.evaluations.interval
                    if self.feeds.valid is not None and self._due(interval, state):
                        self.evaluate("validation", state)
                        evaluated_at = state.iteration
                    due |= self.checkpoints is not None and self._due(self.plan.save_interval, state)
                    reason = self._after_step(state, stop, started, due)
                    if self.context.watch is not None:
                        self.context.watch.under_way()
                    ends = state.iteration >= self.plan.training_plan.end.iteration
                    state = self._compared(state, due=due or ends or reason is not None)
                if state.iteration <= done:  # the run went back to a checkpoint
                    self._saved_at = evaluated_at = state.iteration
                    due = False
                elif due and reason is None and not self.guard.failing(state):
                    self._on_the_way(partial(self._save, state))
                    due = False
            self._save_last(state)  # a second signal does not interrupt this
        if reason is not None:
            self.monitor.message(f"stopping after iteration {state.iteration}: {reason}")
            return state
        if self.feeds.valid is not None and evaluated_at < state.iteration:
            self.evaluate("validation", state)
        if self.feeds.test is not None:
            self.evaluate("test", state)
        return state

    def evaluate(self, split: str, state: TrainState) -> None:
        """Report the losses on the next part of the split, without any effect on training."""
        feed = self.feeds.valid if split == "validation" else self.feeds.test
        assert feed is not None, f"there are no samples for {split}"
        evaluations = self.plan.training_plan.evaluations
        start = evaluations.first_sample(state.iteration) if split == "validation" else 0

        def batches() -> Iterator[Sequence[MicroBatch]]:
            for i in range(evaluations.batches):
                yield feed.micro_batches(start + i * evaluations.batch_size, evaluations.micro_batches)

        began = time.perf_counter()
        with self.timers("evaluation"):
            losses, tokens = self.engine.evaluate(batches())
        self.monitor.evaluation(
            EvalMetrics(
                iteration=state.iteration,
                split=split,
                losses=losses,
                consumed_samples=state.consumed_samples,
                consumed_tokens=state.consumed_tokens,
                num_tokens=tokens,
                seconds=time.perf_counter() - began,
            )
        )

    def _step(self, state: TrainState) -> TrainState:
        began, self._reached = time.perf_counter(), state.iteration + 1
        self.waits.start_step()
        step = self.plan.training_plan.at(state.progress)
        if self.guard.passes_over(state, step):
            return self._pass_over(state, step, began)
        assert self.feeds.train is not None, "there are no samples for training"
        with self.timers("data"):
            batches = self.feeds.train.of_step(step)
        hold = self.checkpoints.saver.wait_for_copies if self.checkpoints is not None else None
        judge = self.guard.judge(state, step, batches)
        store = self.engine.optimizer.store
        moved = traffic(store)
        meter, self._memory = self._memory, None  # the first step is measured
        with self.host_waits.step(), nullcontext() if meter is None else meter.over_a_step():
            result = self.engine.train_step(batches, state.progress, self.timers, hold, judge)
        state = state.after(
            step, result.skipped, self._stability(state, result), bad=result.bad or result.held
        )
        # These take communication, so every rank computes them; the monitor only shows them.
        optimizer, device = self.engine.optimizer, self.context.device
        extras: StepExtras = {
            "params_norm": optimizer.params_norm() if self.plan.log_params_norm else None,
            "num_zeros": optimizer.count_zero_grads() if self.plan.log_num_zeros else None,
            "rank_seconds": self.stragglers.take_summary(),
            "offload": asdict(traffic(store) - moved) if self._offloads else None,
            "memory": None if meter is None else gather_values(self.context.world, meter.sizes(), device),
        }
        if self._due(self.plan.log_interval, state):
            extras["tokens_per_expert"] = self.engine.loads.report(result.tokens)
        seconds = time.perf_counter() - began
        metrics = self._metrics(state, result, step, seconds, extras)
        self.monitor.step(metrics)
        waited, seconds = self.waits.end_step(), time.perf_counter() - began
        self.stragglers.add(seconds, metrics.phase_seconds.get("data", 0.0), waited)
        return self._guarded(state, step, result)

    def _guarded(self, state: TrainState, step: Step, result: StepResult) -> TrainState:
        """Return the state to go on with after a step, which is an earlier one if the run goes back."""
        with self._keeping_checkpoints():
            reached = self.guard.after(state, step, result)
            if reached.iteration == state.iteration:
                self.guard.check_row(reached, result)
                return reached
        self.monitor.rewound(reached.iteration)
        return reached

    def _compared(self, state: TrainState, *, due: bool) -> TrainState:
        """Compare copies if that is due: before a checkpoint, and every `check_weights_interval` steps."""
        interval = self.plan.guards.check_weights_interval
        if not interval or self.guard.failing(state) or not (due or self._due(interval, state)):
            return state
        if self.checkpoints is not None:
            self.checkpoints.saver.wait_for_copies()  # copies that differ are put right
        with self.timers("comparison of copies"), self._keeping_checkpoints():
            reached = self.guard.check_copies(state)
        if reached.iteration < state.iteration:
            self.monitor.rewound(reached.iteration)
        return reached

    def _pass_over(self, state: TrainState, step: Step, began: float) -> TrainState:
        """Pass over a step: its samples are consumed, and nothing else changes."""
        state = state.after(step, True, state.stability)
        result = self.engine.nothing(step.before)
        self.monitor.step(self._metrics(state, result, step, time.perf_counter() - began, {}))
        self.waits.end_step()
        return state

    def _stability(self, state: TrainState, result: StepResult) -> Stability | None:
        """The stability of the training after this step, the same on every rank."""
        if self.plan.stability is None:
            return None
        known = state.stability or Stability()
        if result.skipped:
            return known
        return known.after(result.losses.trained_total, result.grad_norm, self.plan.stability)

    def _metrics(
        self, state: TrainState, result: StepResult, step: Step, seconds: float, extras: StepExtras
    ) -> StepMetrics:
        flops_per_token = self.plan.flops_per_token(step.sequence_length, result.skipping)
        flops_per_token += self.engine.distillation.flops_per_token
        flops = flops_per_token / self.context.world_size
        extras = {**extras, "phase_seconds": self.timers.collect()}
        return step_metrics(self.plan, state, result, step, seconds, flops, extras)

    def _save(self, state: TrainState) -> None:
        assert self.checkpoints is not None, "nothing is to be saved"
        with self.timers("save"):
            visible = self.checkpoints.save(state, {"healthy": self.guard.healthy(state)})
        self._saved_at = state.iteration
        for iteration in visible:
            self._tell(iteration)

    def _save_last(self, state: TrainState) -> None:
        """Make all checkpoints visible, including that of `state`."""
        if self.checkpoints is None:
            return
        self._settle()
        if self.guard.failing(state):
            self.monitor.message(
                f"iteration {state.iteration} is not saved: {state.bad_in_a_row} updates in a row were "
                "skipped"
            )
        elif self._saved_at < state.iteration:
            self._save(state)
        while self.checkpoints.saver.unsettled:
            self._tell(self.checkpoints.saver.settle())

    @contextmanager
    def _keeping_checkpoints(self) -> Iterator[None]:
        """Make the checkpoints visible that are still being written, if the block ends the run."""
        try:
            yield
        except NumericsError:
            self._settle()
            raise

    def _settle(self) -> None:
        """Make the checkpoints that are being written visible, where there are any."""
        if self.checkpoints is None:
            return
        saver = self.checkpoints.saver
        while saver.unsettled:
            self._on_the_way(lambda: self._tell(saver.settle()))

    def _on_the_way(self, work: Callable[[], None]) -> None:
        """Do work that saves; if it fails, which it does on all ranks, training goes on.

        The first rank says so, and earlier checkpoints remain.
        """
        try:
            work()
        except LostFolderError:
            raise  # nothing would be saved from now on
        except CheckpointError as error:
            self._saved_at = -1
            if self.context.rank == 0:
                print(f"error: training goes on without saving: {error}", file=sys.stderr, flush=True)

    def _tell(self, iteration: int | None) -> None:
        if iteration is not None:
            self.monitor.message(f"saved a checkpoint at iteration {iteration}")

    def _note_failure(self, failure: JobFailure) -> None:
        """Write an incident about the failure of the job. The rank that has the diagnosis calls this."""
        details = {"diagnosis": failure.page.splitlines()}
        log = IncidentLog(CompositeMonitor(), self._folder)
        log.add(Incident("job failed", self._reached, failure.summary, "stopped", failure.ranks, details))

    def _report(self, stragglers: list[Straggler], state: TrainState) -> None:
        """Report the ranks that have become slow, and those that no longer are."""
        for straggler in stragglers:
            # A stage of its own may simply have more to do.
            if straggler.recovered or straggler.stage is not None:
                self.monitor.message(str(straggler))
                continue
            ranks, details = (straggler.rank,), asdict(straggler)
            self.incidents.add(Incident("slow rank", state.iteration, str(straggler), "none", ranks, details))

    def _due(self, interval: int | None, state: TrainState) -> bool:
        return interval is not None and state.iteration % interval == 0

    def _after_step(self, state: TrainState, stop: StopRequest, started: float, saves: bool) -> str | None:
        """Settle a checkpoint that all ranks have written, and return the reason to stop, or None.

        The result is the same on all ranks, no matter which of them got a signal, is late, still writes or
        sees that the data changed. saves: whether a checkpoint is due.
        """
        ends = state.iteration >= self.plan.training_plan.end.iteration
        limit = self.plan.exit_seconds
        late = limit is not None and time.monotonic() - started >= limit
        saver = None if self.checkpoints is None else self.checkpoints.saver
        unsettled = saver if saver is not None and saver.unsettled else None
        writes = unsettled is not None and unsettled.busy
        intervals = (
            self.plan.log_interval,
            self.plan.exit_interval,
            self.plan.training_plan.evaluations.interval,
        )
        looks = saves or ends or late or stop.requested or any(self._due(n, state) for n in intervals)
        changed = self.feeds.changed_files() if looks else []
        asked = [float(stop.requested), float(late), float(writes), float(bool(changed))]
        flags = torch.tensor([*asked, *self.stragglers.slots(state.iteration)], device=self.context.device)
        self.context.world.all_reduce(flags, "max").wait()
        stopping, late, writes, changed_somewhere, *times = flags.tolist()
        self._report(self.stragglers.after(state.iteration, times), state)
        if changed_somewhere:
            self._end_for(changed, state)
        if ends:
            return None
        if unsettled is not None and not writes:
            self._on_the_way(lambda: self._tell(unsettled.advance()))
        if stopping:
            return stop.reason or "another rank was asked to stop"
        if late and limit is not None:  # no other rank has another limit
            return f"--exit-duration-in-mins {limit / 60:g} is over"
        if self._due(self.plan.exit_interval, state):
            return f"--exit-interval {self.plan.exit_interval}"
        return None

    def _end_for(self, changed: list[str], state: TrainState) -> NoReturn:
        """Raise DataError with the changes that the first rank to see any reports; checkpoints are kept."""
        self._settle()
        everyone = gather_values(self.context.world, changed, self.context.device)
        rank, clauses = next((rank, files) for rank, files in enumerate(everyone) if files)
        more = f"; and {len(clauses) - _SHOWN} more" if len(clauses) > _SHOWN else ""
        raise DataError(
            f"`data` must not change during a run, but after iteration {state.iteration} rank {rank} sees: "
            f"{'; '.join(clauses[:_SHOWN])}{more}; earlier checkpoints are kept: put the files back and "
            "resume, or set --no-verify-data"
        )
