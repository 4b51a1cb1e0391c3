"""The store through which the ranks of one attempt at a job meet, when torchrun keeps one for all attempts.

torchrun's agent may keep its store when it restarts the ranks (`--max-restarts`). Torch then finds the
addresses of the previous ranks, which are dead (pytorch#135712). TORCHELASTIC_RESTART_COUNT tells attempts
apart on one node only, because each node's agent keeps its own count. So the ranks agree here on a name for
their attempt.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Mapping
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from megazero.mpu.tree import children

_POLL = 0.01


def agent_store(timeout: timedelta, environment: Mapping[str, str] | None = None) -> Store | None:
    """The store that the launcher keeps, or None if the first rank should open one."""
    environment = os.environ if environment is None else environment
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    host, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    store: Store = dist.TCPStore(host, port, is_master=False, timeout=timeout)  # type: ignore[attr-defined]  # torch exports it without saying so
    return store


def store_of_attempt(store: Store, rank: int, world_size: int, timeout: timedelta) -> Store:
    """The part of a store that belongs to this attempt alone, whatever earlier attempts left in the store.

    Every rank asks with a word of its own that no earlier attempt knew. The first rank answers its children
    in the tree of ranks, and they answer theirs.

    Raises:
        RuntimeError: some rank did not ask in time.
    """
    word = uuid.uuid4().hex
    if rank:
        store.set(f"asks/{rank}", word)
        store.wait([f"answer/{word}"], timeout)
        attempt = store.get(f"answer/{word}").decode()
        store.set(f"heard/{word}", attempt)
    else:
        attempt = word
    _answer(store, attempt, set(children(rank, world_size)), timeout)
    return PrefixStore(attempt, store)


def _answer(store: Store, attempt: str, missing: set[int], timeout: timedelta) -> None:
    """Tell these ranks the attempt's name; dead ranks of earlier attempts are answered too, to no effect."""
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
