"""Notices of a run's incidents, failure and end, posted to a URL."""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from http.client import HTTPException
from pathlib import Path
from threading import BoundedSemaphore
from typing import Literal
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from megazero.config.tree.secret import hidden
from megazero.mpu.threads import helper_pool
from megazero.train.observe.incidents import Incident

Event = Literal["incident", "failure", "end"]

_PATIENCE = 5.0  # seconds
_PAUSES = (0.0, 1.0, 3.0)  # seconds before each try
_MOST_WAITING = 20
_LONGEST = 1500  # letters; Discord shows 2000


class Webhook:
    """Posts notices about a run, one after the other, in a thread; none without a URL.

    A chat shows a notice's `text` (Slack, Mattermost) or `content` (Discord). If a URL does not answer, one
    line on standard error says so, and later notices are tried once each. While many wait, further ones are
    dropped. A process ends when what waits is sent.

    Args:
        url: the URL, which may be a secret.
        folder: the run's folder; None if it has none.
    """

    def __init__(self, url: str | None, folder: Path | None):
        self._url, self._folder = url, folder
        self._thread = helper_pool(1, "webhook")
        self._room = BoundedSemaphore(_MOST_WAITING)
        self._pauses: tuple[float, ...] = _PAUSES

    def tell(self, event: Event, incident: Incident) -> None:
        """Post a notice soon, in another thread. Raises nothing."""
        if self._url is None or not self._room.acquire(blocking=False):
            return
        try:
            self._thread.submit(self._deliver, self._url, self._notice(event, incident))
        except RuntimeError:  # the interpreter ends, and starts no threads any more
            self._deliver(self._url, self._notice(event, incident))

    @contextmanager
    def over_run(self, reached: Callable[[], int], *, alone: bool) -> Iterator[None]:
        """Post a notice if the body fails, and no other rank diagnoses it, as this one is `alone`.

        Args:
            reached: the latest iteration that has begun.
        """
        try:
            yield
        except Exception as error:
            if alone:
                summary = f"{type(error).__name__}: {error}"
                self.tell("failure", Incident("job failed", reached(), summary, "stopped"))
            raise

    def _notice(self, event: Event, incident: Incident) -> bytes:
        host, run = socket.gethostname(), None if self._folder is None else str(self._folder)
        said = f"{incident.kind} at iteration {incident.iteration}: {incident.summary}"[:_LONGEST]
        text = f"megazero on {f'{host}, {run}' if run else host}: {said}"
        facts = {"event": event, "run": run, **asdict(incident)}
        del facts["details"]
        facts |= {"host": host, "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
        return json.dumps({**facts, "text": text, "content": text}).encode()

    def _deliver(self, url: str, notice: bytes) -> None:
        try:
            for pause in self._pauses:
                time.sleep(pause)
                if (fault := _posted(url, notice)) is None:
                    return
            if self._pauses == _PAUSES:
                say = f"warning: no notice reaches {hidden(url)}, which `--notify` names: {fault}"
                print(say, file=sys.stderr, flush=True)
            self._pauses = (0.0,)
        finally:
            self._room.release()


def _posted(url: str, notice: bytes) -> str | None:
    """Post a notice; returns what is wrong, in words that do not repeat the URL, or None."""
    headers = {"Content-Type": "application/json", "User-Agent": "megazero"}
    try:
        with urlopen(Request(url, notice, headers), timeout=_PATIENCE):
            return None
    except HTTPError as error:
        return f"it answers with HTTP status {error.code}"
    except (OSError, HTTPException, ValueError) as error:
        return str(getattr(error, "reason", type(error).__name__))
