"""The concern that saves a run: when a checkpoint is due, and when checkpoints in progress become visible."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial

from megazero.errors import CheckpointError, LostFolderError
from megazero.train.observe.monitors.base import Monitor
from megazero.train.resume.snapshot import Snapshots
from megazero.train.step.concern import CONTINUE, SAVE, SharedConcern, StepContext, Verdict, failing, healthy
from megazero.train.step.state import TrainState
from megazero.train.step.timers import Timers


class Saving(SharedConcern):
    """Saves a run at an interval and at its end, and makes checkpoints visible once all ranks have written.

    If a checkpoint before the last cannot be written, the error is reported and training goes on. While steps
    keep failing, a checkpoint that is due waits for the next update.
    """

    def __init__(self, snapshots: Snapshots, interval: int | None, monitor: Monitor, timers: Timers):
        self.snapshots = snapshots
        self.saver = snapshots.saver
        self.interval = interval
        self.monitor = monitor
        self.timers = timers
        self._saved_at = 0
        self._due = False

    def stands_at(self, state: TrainState) -> None:
        self._saved_at, self._due = state.iteration, False

    def after(self, now: StepContext) -> Verdict:
        self._due |= now.due(self.interval)
        return SAVE if self._due and not failing(self.snapshots.engine, now.state) else CONTINUE

    def sees(self, now: StepContext) -> Sequence[float]:
        # Ranks finish writing at different times, and all ranks must call `advance` together. It does not
        # wait once no rank is busy.
        return [float(self.saver.unsettled and self.saver.busy)]

    def agreed(self, now: StepContext, most: Sequence[float]) -> Verdict:
        if self.saver.unsettled and not most[0] and not now.ends:  # `save_last` does it at the end
            self._tolerated(lambda: self._tell(self.saver.advance()))
        return CONTINUE

    def save(self, state: TrainState) -> None:
        """Save the run, or start saving it in the background; if that fails, training continues."""
        while self.saver.is_full(
            state.iteration
        ):  # settled here, so that its failure does not stop this save
            with self.timers("save"):
                self._tolerated(lambda: self._tell(self.saver.settle()))
        self._tolerated(partial(self._save, state))
        self._due = False

    def save_last(self, state: TrainState) -> None:
        """Save `state` and make all checkpoints visible.

        Raises:
            CheckpointError: on every rank: it cannot be written.
        """
        self.settle()
        if failing(self.snapshots.engine, state):
            self.monitor.message(
                f"iteration {state.iteration} is not saved: {state.bad_in_a_row} updates in a row were "
                "skipped"
            )
        elif self._saved_at < state.iteration:
            self._save(state)
        while self.saver.unsettled:
            self._tell(self.saver.settle())

    def settle(self) -> None:
        """Finish the checkpoints in progress, and make them visible."""
        while self.saver.unsettled:
            self._tolerated(lambda: self._tell(self.saver.settle()))

    def _save(self, state: TrainState) -> None:
        with self.timers("save"):
            visible = self.snapshots.save(state, {"healthy": healthy(self.snapshots.engine, state)})
        self._saved_at = state.iteration
        for iteration in visible:
            self._tell(iteration)

    def _tolerated(self, work: Callable[[], None]) -> None:
        """Run work that saves; if it fails (on all ranks), report it on the first rank and continue."""
        try:
            work()
        except LostFolderError:
            raise  # no later checkpoint could be saved either
        except CheckpointError as error:
            self._saved_at = -1
            if self.snapshots.context.rank == 0:
                print(f"error: training goes on without saving: {error}", file=sys.stderr, flush=True)

    def _tell(self, iteration: int | None) -> None:
        if iteration is not None:
            self.monitor.message(f"saved a checkpoint at iteration {iteration}")
