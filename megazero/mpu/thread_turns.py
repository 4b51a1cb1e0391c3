"""Turns: one thread of a world runs at a time, until it has to wait for another one.

Threads that share an interpreter and a core would otherwise pass its lock around at every tensor operation,
which only costs time. A turn ends where a thread waits for another rank, and goes to a thread that can run.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any

_PATIENCE = 0.5
"""Seconds after which a thread that could go on does so without a turn: who has it may be waiting for what
no turn comes with, such as a file or a thread of its own, and must not hold up everyone.
"""


class Turns:
    """The thread whose turn it is, and those that are ready for one.

    Args:
        running: how many threads that take part are running already.
    """

    def __init__(self, running: int = 0):
        self._lock = threading.Lock()
        self._running = running
        self._ready: deque[Ticket] = deque()

    def enter(self) -> None:
        """Let this thread take part; returns when it has a turn."""
        with self._lock:
            self._running += 1
        ticket = Ticket(self)
        ticket.call()
        ticket.wait(float("inf"))

    def leave(self) -> None:
        """End this thread's part; its turn goes to another thread."""
        with self._lock:
            self._running -= 1
            self._pass_on()

    def _pass_on(self) -> None:
        while self._running == 0 and self._ready:
            self._running += 1
            self._ready.popleft().bell.release()


class Ticket:
    """A wait of one thread; used once.

    Args:
        turns: the turns that the thread takes part in; it gives its turn back while it waits. A thread that
            takes part in none has turns of its own.
    """

    def __init__(self, turns: Turns | None = None):
        self.turns = turns or getattr(threading.current_thread(), "turns", None) or Turns(running=1)
        self.bell = threading.Lock()
        self.bell.acquire()
        self._called = False
        self._given_up = False

    def call(self) -> None:
        """Let the waiting thread go on; any thread may call this, before or after `wait` begins, or again."""
        turns = self.turns
        with turns._lock:
            if self._called or self._given_up:
                return
            self._called = True
            turns._ready.append(self)
            turns._pass_on()

    def wait(self, seconds: float) -> bool:
        """Return when called and given a turn, or after `seconds` without a call.

        Returns:
            Whether it was called.
        """
        turns, end = self.turns, time.monotonic() + seconds
        with turns._lock:
            turns._running -= 1
            turns._pass_on()
        while not self.bell.acquire(timeout=max(0.0, min(_PATIENCE, end - time.monotonic()))):
            with turns._lock:
                if self._called and self not in turns._ready:
                    continue  # the turn came just now
                if self._called:
                    turns._ready.remove(self)
                elif time.monotonic() < end:
                    continue
                self._given_up = True
                turns._running += 1
                return self._called
        return True


class RankThread(threading.Thread):
    """A thread that takes part in turns.

    Args:
        turns: the turns of its world.
        more: as for a `threading.Thread`.
    """

    def __init__(self, turns: Turns, **more: Any):
        super().__init__(**more)
        self.turns = turns

    def run(self) -> None:
        """Do the thread's work, from its first turn on."""
        self.turns.enter()
        try:
            super().run()
        finally:
            self.turns.leave()
