"""Small concerns of a run: skipped updates in a row, slow ranks, changed data files, and requests to stop."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from types import FrameType, TracebackType

from megazero.config.tree.guards import GuardsConfig
from megazero.config.tree.training import TrainingConfig
from megazero.errors import DataError, NumericsError
from megazero.mpu.messages import first_value
from megazero.train.observe.incidents import Incident, IncidentLog
from megazero.train.observe.stragglers import Stragglers
from megazero.train.step.concern import (
    CONTINUE,
    Concern,
    SharedConcern,
    StepContext,
    Strength,
    Verdict,
    fail,
    stop,
)
from megazero.train.step.engine import Engine, Outcome
from megazero.train.step.feed import Feeds

_MOST_BAD = 5  # updates skipped in a row
_SHOWN = 3  # changed files in a message


class SkippedRow(Concern):
    """Ends a run in which too many updates in a row were skipped (`max_skipped_updates`)."""

    def __init__(self, config: GuardsConfig, engine: Engine, log: IncidentLog):
        self.config = config
        self.engine = engine
        self.log = log

    def after(self, now: StepContext) -> Verdict:
        state, outcome = now.state, now.result.outcome
        limit: float | None = self.config.max_skipped_updates
        if limit is None:
            searches = self.engine.scaler.searches and outcome is not Outcome.HELD
            limit = math.inf if searches else _MOST_BAD
        if outcome is Outcome.PASSED_OVER or state.bad_in_a_row < limit:
            return CONTINUE
        if outcome is Outcome.HELD:
            why, remedy = "loss or gradient norm was far above the latest ones", ""
        else:
            why, remedy = "a gradient was inf or NaN", ", or change the precision"
        count, iteration = state.bad_in_a_row, state.iteration
        skipped = f"{count} updates in a row were skipped up to iteration {iteration}, because {why}"
        self.log.add(Incident("row of skipped updates", iteration, skipped, "stopped"))
        return fail(
            NumericsError(
                f"`max_skipped_updates` is reached: {skipped}; earlier checkpoints are kept: lower the "
                f"learning rate, look at the data of these steps{remedy}"
            )
        )


class SlowRankReports(SharedConcern):
    """Reports ranks that have become slow, or have recovered."""

    def __init__(self, stragglers: Stragglers, log: IncidentLog):
        self.stragglers = stragglers
        self.log = log

    def sees(self, now: StepContext) -> Sequence[float]:
        return self.stragglers.slots(now.state.iteration)

    def agreed(self, now: StepContext, most: Sequence[float]) -> Verdict:
        for straggler in self.stragglers.after(now.state.iteration, most):
            # A rank that is alone in its stage may have more work than the others.
            if straggler.recovered or straggler.stage is not None:
                self.log.monitor.message(str(straggler))
                continue
            ranks, details = (straggler.rank,), asdict(straggler)
            incident = Incident("slow rank", now.state.iteration, str(straggler), "none", ranks, details)
            self.log.add(incident)
        return CONTINUE


# SIGTERM: schedulers and `kill`. SIGUSR1: SLURM's `--signal=USR1@...` warning before the time limit.
# Not SIGINT: Ctrl-C must raise KeyboardInterrupt at once.
_SIGNAL_NAMES = ("SIGTERM", "SIGUSR1")

_Handler = Callable[[int, FrameType | None], object] | int


class StopRequest:
    """Context in which SIGTERM and SIGUSR1 set `requested` instead of ending the process.

    The previous handlers are restored at the end. Python handles signals only in the main thread, so in other
    threads (ranks as threads) the context does nothing.

    Attributes:
        reason: name of the first signal that arrived, such as `SIGTERM`, or None.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self._previous: dict[int, _Handler | None] = {}

    @property
    def requested(self) -> bool:
        """Whether a signal has arrived since the context was entered."""
        return self.reason is not None

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for name in _SIGNAL_NAMES:
                number = getattr(signal, name, None)  # Windows has no SIGUSR1
                if number is not None:
                    self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            # None stands for a handler set by C code, which Python cannot restore.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous.clear()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.reason is None:
            self.reason = signal.Signals(number).name


class ExitRequests(SharedConcern):
    """Stops a run on a signal, after a time, or at an iteration.

    Attributes:
        signals: the context in which signals are noted as requests.
    """

    def __init__(self, config: TrainingConfig):
        minutes = config.exit_duration_in_mins
        self.signals = StopRequest()
        self.interval = config.exit_interval
        self._limit = None if minutes is None else minutes * 60
        self._started = time.monotonic()

    @property
    def asked(self) -> list[bool]:
        """Whether this rank received a signal, and whether its time is over."""
        late = self._limit is not None and time.monotonic() - self._started >= self._limit
        return [self.signals.requested, late]

    def sees(self, now: StepContext) -> Sequence[float]:
        return list(map(float, self.asked))

    def agreed(self, now: StepContext, most: Sequence[float]) -> Verdict:
        stopping, late = most
        if now.ends:
            return CONTINUE
        if stopping:
            return stop(self.signals.reason or "another rank was asked to stop")
        if late and self._limit is not None:  # the limit is the same on all ranks
            return stop(f"--exit-duration-in-mins {self._limit / 60:g} is over")
        if now.due(self.interval):
            return stop(f"--exit-interval {self.interval}")
        return CONTINUE


class DataUnchanged(SharedConcern):
    """Ends a run if a file of the data has changed since the run began.

    It checks before each save, at the end of the run, and at intervals.

    Args:
        intervals: intervals of iterations at which to check; None is ignored.
        asked: whether this rank is about to stop, for each reason.
    """

    def __init__(
        self,
        feeds: Feeds,
        engine: Engine,
        intervals: Sequence[int | None],
        asked: Callable[[], Sequence[bool]],
    ):
        self.feeds = feeds
        self.engine = engine
        self.intervals = intervals
        self.asked = asked
        self._changed: list[str] = []

    def sees(self, now: StepContext) -> Sequence[float]:
        saves = now.verdict.strength >= Strength.SAVE
        looks = saves or now.ends or any(self.asked()) or any(map(now.due, self.intervals))
        self._changed = self.feeds.changed_files() if looks else []
        return [float(bool(self._changed))]

    def agreed(self, now: StepContext, most: Sequence[float]) -> Verdict:
        if not most[0]:
            return CONTINUE
        context = self.engine.context
        first = first_value(context.world, self._changed or None, context.device)
        assert first is not None, "some rank sees a change"
        rank, clauses = first
        more = f"; and {len(clauses) - _SHOWN} more" if len(clauses) > _SHOWN else ""
        return fail(
            DataError(
                f"`data` must not change during a run, but after iteration {now.state.iteration} rank {rank} "
                f"sees: {'; '.join(clauses[:_SHOWN])}{more}; earlier checkpoints are kept: put the files "
                "back and resume, or set --no-verify-data"
            )
        )
