from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from megazero.mpu import tree
from megazero.mpu.attempt_store import agent_store, store_of_attempt

SOON = timedelta(seconds=20)


@pytest.fixture
def server():
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def meet(server: dist.TCPStore, attempt: int, world_size: int) -> dict[int, bytes]:
    """What each rank finds of what the first one left."""
    found: dict[int, bytes] = {}

    def work(rank: int) -> None:
        store = dist.TCPStore("127.0.0.1", server.port, is_master=False, timeout=SOON)
        mine = store_of_attempt(store, rank, world_size, SOON)
        if rank == 0:
            mine.set("word", str(attempt))
        found[rank] = mine.get("word")

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_every_attempt_has_a_part_of_its_own(server):
    for attempt in range(3):
        assert meet(server, attempt, 3) == dict.fromkeys(range(3), str(attempt).encode())


def test_ranks_answer_their_children(server, monkeypatch):
    monkeypatch.setattr(tree, "FAN", 2)
    for attempt in range(2):
        assert meet(server, attempt, 8) == dict.fromkeys(range(8), str(attempt).encode())


def test_an_attempt_to_which_not_all_came_does_not_disturb_the_next(server):
    late = dist.TCPStore("127.0.0.1", server.port, is_master=False, timeout=SOON)
    with pytest.raises(RuntimeError):
        store_of_attempt(late, 1, 3, timedelta(seconds=0.2))
    with pytest.raises(RuntimeError, match=r"ranks \[1, 2\] did not come"):
        store_of_attempt(late, 0, 3, timedelta(seconds=0.2))
    assert meet(server, 7, 3) == dict.fromkeys(range(3), b"7")


def test_only_a_store_that_the_launcher_keeps_is_used(server):
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.port)}
    assert agent_store(SOON, where) is None
    assert agent_store(SOON, {**where, "TORCHELASTIC_USE_AGENT_STORE": "False"}) is None
    server.set("word", "x")
    assert agent_store(SOON, {**where, "TORCHELASTIC_USE_AGENT_STORE": "True"}).get("word") == b"x"
