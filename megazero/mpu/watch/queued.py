"""`QueuedCalls`: calls that have returned while their device has yet to finish them, as NCCL's do."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

from megazero.mpu.watch.log import Call, CallLog

_LONG = 1024  # calls; the watch looks at them once a second


class Mark(Protocol):
    """A place in the work that is queued on the device, such as a `torch.cuda.Event`."""

    def record(self) -> None:
        """Be behind all that the current stream has been given."""

    def query(self) -> bool:
        """Whether the device has come to this place."""


class QueuedCalls:
    """The calls that the device has been given, in order, each with a mark behind it.

    A call over NCCL returns when it is queued, and so does a wait for it, which makes the stream wait. A
    mark, not the `Work`, says when it is done: a synchronous call gives no `Work`, and one of NCCL's would
    hold the call's result in memory.

    Args:
        log: where they are recorded.
        new_mark: makes a mark.
    """

    def __init__(self, log: CallLog, new_mark: Callable[[], Mark]):
        self._log, self._new_mark = log, new_mark
        self._calls: deque[tuple[Call, Mark]] = deque()
        self._spare: deque[Mark] = deque()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._calls)

    def add(self, call: Call) -> None:
        """Keep `call`, which has just returned, until the device has finished it."""
        try:
            mark = self._spare.popleft()
        except IndexError:
            mark = self._new_mark()
        mark.record()
        self._log.hand_back(call)
        self._calls.append((call, mark))
        if len(self._calls) > _LONG:
            self.settle()

    def settle(self) -> None:
        """Record that those calls are done which the device has finished.

        Raises:
            RuntimeError: the device has failed.
        """
        with self._lock:
            while self._calls and self._calls[0][1].query():
                call, mark = self._calls.popleft()
                self._log.finish(call)
                self._spare.append(mark)
