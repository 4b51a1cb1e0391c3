"""Helper threads. CUDA's current device is each thread's own, and the first one until it is set."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch


def helper_pool(workers: int, name: str) -> ThreadPoolExecutor:
    """A pool of threads that have the CUDA device of the thread which calls this."""
    return ThreadPoolExecutor(workers, name, initializer=_device_setter())


def helper_thread(body: Callable[[], object], name: str) -> threading.Thread:
    """A daemon thread, not started, that has the CUDA device of the thread which calls this."""
    set_device = _device_setter()

    def run() -> None:
        set_device()
        body()

    return threading.Thread(target=run, daemon=True, name=name)


def _device_setter() -> Callable[[], None]:
    """A function that makes this thread's device another's; it does nothing where CUDA is not in use.

    A CUDA call from a thread without a device would open a context on the first GPU, for half a gigabyte.
    """
    if not torch.cuda.is_initialized():
        return lambda: None
    device = torch.cuda.current_device()
    return lambda: torch.cuda.set_device(device)
