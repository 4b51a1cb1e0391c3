"""Turns a request to stop into a flag that the loop reads between steps."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType

# SIGTERM: schedulers and `kill`. SIGUSR1: SLURM's `--signal=USR1@...` warning before the time limit.
# SIGINT is left to Python: Ctrl-C raises KeyboardInterrupt at once.
_SIGNAL_NAMES = ("SIGTERM", "SIGUSR1")

_Handler = Callable[[int, FrameType | None], object] | int


class StopRequest:
    """Context in which SIGTERM and SIGUSR1 set `requested` instead of ending the process.

    The previous handlers are restored at the end. Python handles signals only in the main thread; in other
    threads (ranks as threads), entering changes nothing and `requested` stays false.

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
