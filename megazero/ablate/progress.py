"""Show the progress of runs: a live table on a terminal, else a line per change of a run's state."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.table import Table

from megazero.ablate.trial import Trial


class RunState(Enum):
    """The state of a run; the value is the word that is shown."""

    WAITING = "waiting"
    RUNNING = "running"
    FOUND = "was finished"
    DONE = "finished"
    FAILED = "failed"
    STOPPED = "stopped"


class ProgressTable:
    """A table of each run's state, steps and latest validation loss; a context manager.

    Args:
        trials: all runs, in the order of the table.
        console: the console to print to; standard output by default.
    """

    def __init__(self, trials: Sequence[Trial], console: Console | None = None) -> None:
        self._console = console or Console(highlight=False)
        self._rows = {trial.name: (RunState.WAITING.value, f"0/{trial.steps}", "") for trial in trials}
        self._live: Live | None = None

    def __enter__(self) -> ProgressTable:
        if self._console.is_terminal:
            self._live = Live(self._table(), console=self._console, refresh_per_second=2)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def show(self, trial: Trial, state: RunState) -> None:
        """Show a run's state, and the step and loss in its metrics."""
        before = self._rows[trial.name][0]
        losses = [record["lm_loss"] for record in trial.evaluations()]
        loss = "" if not losses or losses[-1] is None else f"{float(losses[-1]):.4f}"
        self._rows[trial.name] = (state.value, f"{trial.steps_done()}/{trial.steps}", loss)
        if self._live is not None:
            self._live.update(self._table())
        elif state.value != before:
            validation = f", validation loss {loss}" if loss else ""
            steps = self._rows[trial.name][1]
            self._console.print(
                f"{trial.name}: {state.value}, step {steps}{validation}", markup=False, soft_wrap=True
            )

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
        for column in ("run", "state", "step", "validation loss"):
            table.add_column(column, justify="left" if column in ("run", "state") else "right")
        for name, cells in self._rows.items():
            table.add_row(name, *cells)
        return table
