"""Train the trials that are not finished, one after another, each in its own processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from megazero.ablate.progress import ProgressTable, RunState
from megazero.ablate.trial import Trial
from megazero.config.document import to_yaml
from megazero.errors import ConfigError

_SCRIPTS = Path(__file__).resolve().parents[2]
_GLANCE = 1.0  # seconds between looks at a run's metrics
_PATIENCE = 120.0  # seconds for a run to save when it is told to stop
_TAIL = 12  # lines of a failed run's log

Command = Callable[[Trial], list[str]]
"""A function that returns the command line that trains a trial by its file `settings`."""


@dataclass(frozen=True)
class Failure:
    """A run that did not get to its end: the reason, and the last lines that it printed."""

    trial: Trial
    reason: str
    tail: tuple[str, ...]

    def __str__(self) -> str:
        last = "".join(f"\n    {line}" for line in self.tail)
        return f"{self.trial.name}: {self.reason} ({self.trial.log}){last}"


def training_command(trial: Trial) -> list[str]:
    """The command line that runs pretrain_gpt.py or pretrain_bert.py, under torchrun for several ranks.

    Raises:
        ConfigError: the script is not where a checkout has it.
    """
    script = _SCRIPTS / f"pretrain_{trial.member.config.model.family}.py"
    if not script.exists():
        raise ConfigError(
            f"`{script.name}` must lie beside the package, but {script} does not exist; run this command "
            "from a checkout"
        )
    words = [str(script), "--config", str(trial.settings)]
    if trial.ranks == 1:
        return [sys.executable, *words]
    several = ["--standalone", "--nproc-per-node", str(trial.ranks)]
    return [sys.executable, "-m", "torch.distributed.run", *several, *words]


def run_all(
    trials: Sequence[Trial], board: ProgressTable, command: Command = training_command
) -> list[Failure]:
    """Train every trial that is not finished; an interrupted one goes on from its checkpoint.

    After a failure, the other trials are still trained. Ctrl-C, SIGTERM and SIGHUP let the current run save,
    and then end the call with KeyboardInterrupt.

    Args:
        trials: the trials, in the order of training.
        board: shows the progress.
        command: returns the command line of a run.

    Returns:
        The runs that did not get to their end.
    """
    with _interruptible():
        return [failure for trial in trials if (failure := _run(trial, board, command)) is not None]


@contextmanager
def _interruptible() -> Iterator[None]:
    """Let SIGTERM, and SIGHUP unless it is ignored (nohup), end this process as Ctrl-C does."""
    previous = {}
    if threading.current_thread() is threading.main_thread():
        for name in ("SIGTERM", "SIGHUP"):
            number = getattr(signal, name, None)  # Windows has no SIGHUP
            if number is not None and signal.getsignal(number) != signal.SIG_IGN:
                previous[number] = signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _run(trial: Trial, board: ProgressTable, command: Command) -> Failure | None:
    if trial.finished():
        board.show(trial, RunState.FOUND)
        return None
    words = command(trial)
    trial.folder.mkdir(parents=True, exist_ok=True)
    trial.settings.write_text(to_yaml(trial.config()), encoding="utf-8")
    board.show(trial, RunState.RUNNING)
    with trial.log.open("ab") as log:
        start = log.tell()
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=_environment(trial.ranks),
            start_new_session=True,  # so that Ctrl-C reaches this process alone, which asks the run to save
        )
        try:
            status = _watched(process, trial, board)
        except BaseException:
            _stop(process)
            board.show(trial, RunState.STOPPED)
            raise
    if status == 0 and trial.finished():
        board.show(trial, RunState.DONE)
        return None
    board.show(trial, RunState.FAILED)
    return Failure(trial, _reason(trial, status), _last_lines(trial.log, start))


def _watched(process: subprocess.Popen[bytes], trial: Trial, board: ProgressTable) -> int:
    """Show a run's progress until it ends; returns its exit status."""
    while True:
        try:
            return process.wait(timeout=_GLANCE)
        except subprocess.TimeoutExpired:
            board.show(trial, RunState.RUNNING)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ask a run to save and end; kill it if it does not end in time."""
    process.terminate()
    try:
        process.wait(timeout=_PATIENCE)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _reason(trial: Trial, status: int) -> str:
    if status < 0:
        return f"was ended by {signal.Signals(-status).name}"
    if status > 0:
        return f"failed with status {status}"
    done, steps = trial.steps_done(), trial.steps
    if done < steps:
        return f"stopped at step {done} of {steps}; run the command again to go on"
    return "made all steps, but was not evaluated on validation data; check `split` or the data"


def _last_lines(path: Path, start: int) -> tuple[str, ...]:
    with path.open("rb") as log:
        log.seek(start)
        text = log.read().decode("utf-8", errors="replace")
    return tuple(line for line in text.splitlines() if line.strip())[-_TAIL:]


def _environment(ranks: int) -> dict[str, str]:
    """This process's environment, with the cores divided among the ranks unless OMP_NUM_THREADS is set."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {"OMP_NUM_THREADS": str(max(1, cores // ranks)), **os.environ}
