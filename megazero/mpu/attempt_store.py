"""The store through which the ranks of one attempt of a job meet, where torchrun keeps one for all attempts.

torchrun's agent may keep its store when it restarts the ranks (`--max-restarts`). Torch then finds the
addresses of the ranks of before, which are dead (pytorch#135712). TORCHELASTIC_RESTART_COUNT tells attempts
apart on one node only, as each node's agent counts for itself. So the ranks agree here on a name for theirs.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Mapping
from datetime import timedelta

import torch.distributed as dist

_POLL = 0.01


def agent_store(timeout: timedelta, environment: Mapping[str, str] | None = None) -> dist.Store | None:
    """The store that the launcher keeps, or None where the first rank is to open one."""
    environment = os.environ if environment is None else environment
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    address = (environment["MASTER_ADDR"], int(environment["MASTER_PORT"]))
    return dist.TCPStore(*address, is_master=False, timeout=timeout)


def store_of_attempt(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """The part of a store that is this attempt's alone, whatever earlier attempts have left in it.

    Every rank asks with a word of its own, which no earlier attempt knew, and the first rank answers all.

    Raises:
        RuntimeError: some rank did not come.
    """
    word = uuid.uuid4().hex
    if rank == 0:
        _answer(store, word, set(range(1, world_size)), timeout)
        return dist.PrefixStore(word, store)
    store.set(f"asks/{rank}", word)
    store.wait([f"answer/{word}"], timeout)
    attempt = store.get(f"answer/{word}").decode()
    store.set(f"heard/{word}", attempt)
    return dist.PrefixStore(attempt, store)


def _answer(store: dist.Store, attempt: str, missing: set[int], timeout: timedelta) -> None:
    """Tell all the name of the attempt; who asked in an earlier one is answered too, but does not hear it."""
    deadline = time.monotonic() + timeout.total_seconds()
    while missing:
        for rank in sorted(missing):
            if not store.check([f"asks/{rank}"]):
                continue
            word = store.get(f"asks/{rank}").decode()
            store.set(f"answer/{word}", attempt)
            if store.check([f"heard/{word}"]) and store.get(f"heard/{word}").decode() == attempt:
                missing.discard(rank)
        if missing and time.monotonic() > deadline:
            raise RuntimeError(f"ranks {sorted(missing)} did not come within {timeout}")
        time.sleep(_POLL)
