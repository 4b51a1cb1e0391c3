"""Ranks as threads: one meeting per call, turns, and what happens to the others when one does not come."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from megazero.errors import CommunicationError
from megazero.mpu.group import Transfer
from megazero.mpu.thread_group import ThreadWorld
from megazero.mpu.thread_turns import Ticket, Turns


def test_a_member_may_change_its_tensor_as_soon_as_its_call_returns():
    """What a member brought is read before any of them goes on, or the next value would be summed."""
    world, ranks = ThreadWorld(4, timeout=20), (0, 1, 2, 3)

    def work(rank):
        group, found = world.group("g", rank, ranks), []
        mine = torch.zeros(3)
        for step in range(200):
            mine.fill_(float(step * 4 + rank))
            group.all_reduce(mine)
            found.append(mine.tolist())
            mine.fill_(-1e6)  # at once
        source = torch.full((2,), float(rank))
        for step in range(200):
            group.broadcast(source, step % 4)
            found.append(source.tolist())
            source.fill_(float(rank + step))
        return found

    results = world.run(work)
    assert all(each == results[0] for each in results)
    assert [each[0] for each in results[0][:200]] == [4.0 * 4 * step + 6 for step in range(200)]
    assert [each[0] for each in results[0][201:]] == [step % 4 + step - 1 for step in range(1, 200)]


def test_sub_groups_meet_in_any_order():
    """Pairs, rows and the whole world by turns, with messages in between."""
    world = ThreadWorld(8, timeout=20)

    def work(rank):
        pair = world.group("pair", rank, (rank // 2 * 2, rank // 2 * 2 + 1))
        column = world.group("column", rank, tuple(range(rank % 2, 8, 2)))
        whole = world.group("world", rank, tuple(range(8)))
        total = torch.tensor([float(rank)])
        for _ in range(30):
            for group in (pair, column, whole):
                group.all_reduce(total)
                total /= group.size
            ahead, behind = (rank + 1) % 8, (rank - 1) % 8
            got = torch.empty(1)
            for work in whole.exchange([Transfer("recv", got, behind), Transfer("send", total, ahead)]):
                work.wait()
            total.copy_(got)
        return total.item()

    assert set(world.run(work)) == {3.5}


def test_an_operation_that_fails_fails_on_every_rank():
    """The last to come works out everyone's result, so its error is theirs."""
    world, seen = ThreadWorld(3, timeout=20), []

    def work(rank):
        group = world.group("g", rank, (0, 1, 2))
        try:
            # Each cuts its two rows for two members, of whom there are three.
            group.all_to_all(torch.empty(2), torch.zeros(2), input_splits=[1, 1])
        except CommunicationError as error:
            seen.append((rank, str(error)))

    world.run(work)
    assert sorted(rank for rank, _ in seen) == [0, 1, 2]
    assert all("`all_to_all` over group `g`" in said for _, said in seen)


def test_a_receiver_is_told_when_another_rank_fails():
    world = ThreadWorld(2, timeout=20)
    began = time.monotonic()
    said = []

    def work(rank):
        group = world.group("g", rank, (0, 1))
        if rank == 1:
            raise ValueError("rank 1 is ill")
        try:
            group.exchange([Transfer("recv", torch.empty(1), 1)])[0].wait()
        except CommunicationError as error:
            said.append(str(error))
            raise

    with pytest.raises(ValueError, match="rank 1 is ill"):
        world.run(work)
    assert "another member failed" in said[0]
    assert time.monotonic() - began < 10


def test_a_message_that_never_comes_is_an_error():
    world = ThreadWorld(2, timeout=0.2)

    def work(rank):
        if rank == 0:
            world.group("g", rank, (0, 1)).exchange([Transfer("recv", torch.empty(1), 1)])[0].wait()

    with pytest.raises(CommunicationError, match="nothing came within 0.2 s"):
        world.run(work)


def test_one_rank_runs_at_a_time():
    world, running, most = ThreadWorld(6, timeout=20), [], []

    def work(rank):
        group = world.group("g", rank, tuple(range(6)))
        for _ in range(50):
            running.append(rank)
            sum(range(2000))
            most.append(len(running))
            running.remove(rank)
            group.barrier()

    world.run(work)
    assert max(most) == 1


def test_ranks_that_wait_for_each_other_in_other_ways_get_on():
    """A rank that waits for an event keeps its turn; the one that sets it must not wait for that for long."""
    world, event = ThreadWorld(2, timeout=20), threading.Event()

    def work(rank):
        world.group("g", rank, (0, 1)).barrier()
        if rank == 0:
            return event.wait(15)
        event.set()
        return True

    assert world.run(work) == [True, True]


def test_a_thread_of_a_rank_may_call_too():
    world = ThreadWorld(2, timeout=20)

    def work(rank):
        found = []

        def background():
            value = torch.tensor([rank + 1.0])
            world.group("other", rank, (0, 1)).all_reduce(value)
            found.append(value.item())

        thread = threading.Thread(target=background)
        thread.start()
        world.group("g", rank, (0, 1)).barrier()
        thread.join()
        return found

    assert world.run(work) == [[3.0], [3.0]]


def test_a_call_before_the_wait_is_not_lost_and_a_second_one_changes_nothing():
    turns = Turns(running=1)
    ticket = Ticket(turns)
    ticket.call()
    ticket.call()
    assert ticket.wait(0.0)
    late = Ticket(turns)
    assert not late.wait(0.01)
    late.call()  # nobody waits any more, and nobody gets a turn for it
    again = Ticket(turns)
    again.call()
    assert again.wait(0.0)
