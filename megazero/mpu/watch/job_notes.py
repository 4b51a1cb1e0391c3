"""Notes that the processes of a job leave for each other, outside any collective."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Protocol, TypeVar

from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import Store

from megazero.errors import CommunicationError
from megazero.mpu.threads import helper_thread

_PREFIX = "megazero/watch"
_ANSWER = 10.0  # seconds
_Result = TypeVar("_Result")


class SilentKeeperError(CommunicationError):
    """The process that keeps the notes has not answered, as one that is stopped does not.

    Args:
        keeper: that process, in words.
        seconds: how long it has been silent.
    """

    def __init__(self, keeper: str, seconds: float):
        super().__init__(
            f"{keeper}, which keeps the job's key-value store, is stopped or out of reach: no answer for "
            f"{seconds:.0f} s"
        )
        self.keeper = keeper


class JobNotes(Protocol):
    """Notes that every process can leave and read; no method waits for another process's note.

    All raise `CommunicationError` if the notes cannot be reached, and `SilentKeeperError` if whoever keeps
    them does not answer in time. Several threads may call them.
    """

    def post(self, key: str, text: str) -> None:
        """Leave `text` under `key`."""

    def read(self, key: str) -> str | None:
        """The text left under `key`, or None."""

    def read_all(self, keys: Sequence[str]) -> list[str | None]:
        """The text left under each key, or None."""


class StoreJobNotes(JobNotes):
    """Notes in a key-value store of torch.distributed.

    Args:
        store: for example the world's. This object opens its own connection to it: otherwise a main thread
            that waits for a key in the store would keep the notes from getting through.
        keeper: the process that keeps the store, in words.
        patience: seconds to wait for an answer. The store's own calls wait forever for a process that is
            stopped, so they run in a thread of this object, which may stay behind in one.
    """

    def __init__(self, store: Store, keeper: str = "the launcher or rank 0", patience: float = _ANSWER):
        self._store: Store = store.clone()  # type: ignore[attr-defined]  # torch's stub leaves it out
        self._keeper = keeper
        self._patience = patience
        self._asked: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        helper_thread(partial(_answer, self._asked), "job notes").start()
        weakref.finalize(self, self._asked.put, None)

    @classmethod
    def of_world(cls, keeper: str = "the launcher or rank 0", patience: float = _ANSWER) -> StoreJobNotes:
        """Notes in the store that the world was started with, which only this attempt of the job uses."""
        # torch has no public name for it.
        return cls(distributed_c10d._get_default_store(), keeper, patience)

    def post(self, key: str, text: str) -> None:
        store = self._store
        self._ask(lambda: store.set(f"{_PREFIX}/{key}", text))

    def read(self, key: str) -> str | None:
        return self.read_all([key])[0]

    def read_all(self, keys: Sequence[str]) -> list[str | None]:
        store, keys = self._store, [f"{_PREFIX}/{key}" for key in keys]

        def read() -> list[str | None]:
            there = keys if store.check(keys) else [key for key in keys if keys[1:] and store.check([key])]
            texts = dict(zip(there, store.multi_get(there) if there else (), strict=True))
            return [texts[key].decode(errors="replace") if key in texts else None for key in keys]

        return self._ask(read)

    def _ask(self, work: Callable[[], _Result]) -> _Result:
        answer: Future[_Result] = Future()
        self._asked.put(partial(_settle, answer, work))
        try:
            return answer.result(self._patience)
        except TimeoutError:
            answer.cancel()  # what has not begun need not be done any more
            raise SilentKeeperError(self._keeper, self._patience) from None
        except RuntimeError as error:
            raise CommunicationError(
                f"the job's key-value store, which {self._keeper} keeps, is out of reach: {error}"
            ) from error


def keeper_of_store(environment: Mapping[str, str] | None = None) -> str:
    """The process that keeps the store of a job, in words, as the launcher's environment variables say."""
    environment = os.environ if environment is None else environment
    who = "the launcher's agent" if environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else "rank 0"
    host = environment.get("MASTER_ADDR")
    return f"{who} on {host}" if host else who


def _answer(asked: SimpleQueue[Callable[[], None] | None]) -> None:
    """Do the jobs that are put into `asked`, one after the other, until None comes."""
    while (job := asked.get()) is not None:
        job()
        del job  # an error in its answer holds the frames of who asked, and so the notes


def _settle(answer: Future[_Result], work: Callable[[], _Result]) -> None:
    """Do the work and set its answer, unless that has been cancelled."""
    if answer.set_running_or_notify_cancel():
        try:
            answer.set_result(work())
        except BaseException as error:
            answer.set_exception(error)
