"""Jobs of three Gloo ranks, sound ones and then faulty ones: ``fault_ranks.py FOLDER [heartbeat]``.

With ``heartbeat`` these are jobs whose ranks listen for each other's signs of life, and one is stopped.

Each rank is a process of its own, forked after torch is loaded. What it writes goes to
FOLDER/<scenario>.<rank>, and FOLDER/results.json says how each ended: status (negative: the signal) and
seconds since the start; null for one that had to be ended from here.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
import sys
import time
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from megazero.errors import DataError, MegazeroError
from megazero.mpu.group import DONE, Group, Transfer, Work
from megazero.mpu.torch_group import TorchGroup, leave_world, open_group, start_world
from megazero.mpu.watch.group import watched
from megazero.mpu.watch.job_notes import StoreJobNotes
from megazero.mpu.watch.watch import Watch, WatchLimits
from megazero.mpu.wrapping_group import GroupCall, WrappingGroup

RANKS = 3
TIMEOUT = 3.0
GRACE = 4.0
HEARTBEAT = 3.0
PATIENCE = 30.0


class Stream(WrappingGroup):
    """Gloo's calls in place of NCCL's: they and the waits for them return at once, and go on."""

    def __init__(self, inner: TorchGroup):
        super().__init__(inner)
        self.works: list[Work] = []

    def _collective(self, call: GroupCall) -> Work:
        self.works.append(call._replace(async_op=True).start(self.inner))
        return Returned() if call.async_op else DONE

    def pending(self) -> list[Work]:
        """The calls that go on; those that are done are forgotten."""
        self.works = [work for work in self.works if not work.is_completed()]
        return list(self.works)

    def tolist(self) -> None:
        """Block in a wait that Python cannot interrupt, as a read from the device does."""
        for work in self.works:
            work.wait()


class Returned(Work):
    """A work that makes a stream wait, and not the host."""

    def wait(self) -> None:
        return None


class StreamMark:
    """In place of a CUDA event in the stream."""

    def __init__(self, stream: Stream):
        self.stream = stream
        self.works: list[Work] = []

    def record(self) -> None:
        self.works = self.stream.pending()

    def query(self) -> bool:
        self.works = [work for work in self.works if not work.is_completed()]
        return not self.works


def fine(group: Group, watch: Watch) -> None:
    for _ in range(300):  # more than the log holds
        group.all_reduce(torch.zeros(4))
    group.all_reduce(torch.zeros(4), async_op=True).wait()


def skip(group: Group, watch: Watch) -> None:
    group.all_reduce(torch.zeros(4))
    if group.rank != 1:
        group.all_reduce(torch.zeros(8))
    group.barrier()


def shape(group: Group, watch: Watch) -> None:
    group.all_reduce(torch.zeros(4))
    group.all_reduce(torch.zeros(900_000 if group.rank == 2 else 4))
    group.barrier()


def killed(group: Group, watch: Watch) -> None:
    group.all_reduce(torch.zeros(4))
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    group.all_reduce(torch.zeros(8))


def killed_with_the_store(group: Group, watch: Watch) -> None:
    group.all_reduce(torch.zeros(4))
    if group.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    group.all_reduce(torch.zeros(8))


def raises(group: Group, watch: Watch) -> None:
    group.all_reduce(torch.zeros(4))
    if group.rank == 2:
        raise DataError("`corpus.bin` must hold 10 tokens, but holds 7; mend it")
    group.all_reduce(torch.zeros(8))


def raises_and_tells_nobody(group: Group, watch: Watch) -> None:
    if group.rank == 1:
        raise ZeroDivisionError("of rank 1")
    group.all_reduce(torch.zeros(8))


def sleeps(group: Group, watch: Watch) -> None:
    group.all_reduce(torch.zeros(4))
    if group.rank == 1:
        time.sleep(60)
    group.all_reduce(torch.zeros(8), async_op=True).wait()


def fine_on_a_device(group: Group, watch: Watch) -> None:
    for _ in range(300):
        group.all_reduce(torch.zeros(4))
        group.all_reduce(torch.zeros(4), async_op=True).wait()
    group.inner.tolist()


def stuck_on_a_device(group: Group, watch: Watch, async_op: bool = False) -> None:
    group.all_reduce(torch.zeros(4))
    group.inner.tolist()
    if group.rank == 1:
        time.sleep(60)
    group.all_reduce(torch.zeros(8), async_op=async_op).wait()
    group.inner.tolist()


def stuck_on_a_device_async(group: Group, watch: Watch) -> None:
    stuck_on_a_device(group, watch, async_op=True)


def sends_nothing(group: Group, watch: Watch) -> None:
    x = torch.zeros(6)
    if group.rank == 0:
        group.exchange([Transfer("recv", x, 2, tag=5)])[0].wait()
    group.barrier()


def compared(group: Group, watch: Watch) -> None:
    group = watched(group.inner, watch, check_on="cpu")
    group.all_reduce(torch.zeros(4))
    if group.rank == 0:
        group.broadcast(torch.zeros(4), 0)
    else:
        group.all_reduce(torch.zeros(4), "max")


def stop_when_under_way(group: Group, watch: Watch, rank: int) -> None:
    group.all_reduce(torch.zeros(4))
    watch.under_way()
    time.sleep(HEARTBEAT / 2)  # until the others have heard of it
    if group.rank == rank:
        os.kill(os.getpid(), signal.SIGSTOP)
    group.all_reduce(torch.zeros(8))


def stopped(group: Group, watch: Watch) -> None:
    stop_when_under_way(group, watch, 1)


def stopped_with_the_store(group: Group, watch: Watch) -> None:
    stop_when_under_way(group, watch, 0)


def leaves_early(group: Group, watch: Watch) -> None:
    watch.under_way()
    if group.rank == 1:
        watch.leave()
    time.sleep(2 * HEARTBEAT)


SCENARIOS = (
    *(fine, skip, shape, killed, killed_with_the_store, raises, raises_and_tells_nobody, sleeps),
    *(sends_nothing, compared, fine_on_a_device, stuck_on_a_device, stuck_on_a_device_async),
)
SOUND = (fine, fine_on_a_device)
ON_A_DEVICE = (fine_on_a_device, stuck_on_a_device, stuck_on_a_device_async)
STOPPED = ("stopped", "stopped_with_the_store")
WITH_HEARTBEAT = (stopped, stopped_with_the_store, leaves_early)
# Unloading torch takes half a second of a core, so only these run through the interpreter's whole exit.
WHOLE_EXIT = (fine, raises, raises_and_tells_nobody)


def run(scenario, rank: int, address: tuple[str, int], listener: int | None) -> int:
    """One rank: join, run the scenario, and end as a program does. Rank 0 keeps the store at `address`."""
    wait = timedelta(seconds=60)
    keeper = {} if listener is None else {"is_master": True, "master_listen_fd": listener}
    store = dist.TCPStore(*address, RANKS, timeout=wait, wait_for_workers=False, **keeper)
    start_world("gloo", rank, RANKS, wait, store=store)
    heartbeat = HEARTBEAT if scenario in WITH_HEARTBEAT else None
    timeout = TIMEOUT if heartbeat is None else PATIENCE
    job_notes = StoreJobNotes.of_world(*(() if heartbeat is None else ("rank 0 on this host", 1.0)))
    group: Group = open_group("tp", rank, tuple(range(RANKS)), wait)
    new_mark = None
    if scenario in ON_A_DEVICE:
        group = Stream(group)
        new_mark = partial(StreamMark, group)
    watch = Watch(job_notes, rank, RANKS, WatchLimits(timeout, GRACE, 0.2, heartbeat), new_mark=new_mark)
    group = watched(group, watch)
    try:
        scenario(group, watch)
    except MegazeroError as error:
        watch.report(error)
        watch.close()
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    group.barrier()
    watch.close()
    leave_world()
    return 0


def start(scenario, rank: int, listeners: dict, folder: Path) -> int:
    """Fork a rank; returns its process id, and does not return in the rank."""
    child = os.fork()
    if child:
        return child
    file = os.open(folder / f"{scenario.__name__}.{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    faulthandler.register(signal.SIGUSR1)
    address, listener = listeners[scenario].getsockname(), None
    for other, each in listeners.items():
        if rank == 0 and other is scenario:
            listener = each.detach()
        else:
            each.close()  # or it would answer after the death of rank 0
    status = run(scenario, rank, address, listener)
    if scenario in WHOLE_EXIT:
        sys.exit(status)
    sys.stderr.flush()
    os._exit(status)


def main(folder: Path, scenarios: tuple) -> None:
    """Jobs in which calls must be done in time run by themselves, and then all others at once."""
    torch.set_num_threads(1)
    results, in_time = {}, (*SOUND, *ON_A_DEVICE)
    for own in (SOUND, ON_A_DEVICE, [s for s in scenarios if s not in in_time]):
        results |= together(folder, [s for s in own if s in scenarios and s.__name__ not in results])
    (folder / "results.json").write_text(json.dumps(results), encoding="utf-8")


def together(folder: Path, scenarios: list) -> dict[str, list]:
    """Run jobs at once; returns how the ranks of each ended, and after how many seconds."""
    begun = time.monotonic()
    results: dict[str, list] = {scenario.__name__: [None] * RANKS for scenario in scenarios}
    # Open from the start: a port that is only free may soon be taken.
    listeners = {scenario: socket.create_server(("127.0.0.1", 0)) for scenario in scenarios}
    running = {}
    for scenario in scenarios:
        for rank in range(RANKS):
            running[start(scenario, rank, listeners, folder)] = (scenario.__name__, rank)
    for listener in listeners.values():
        listener.close()
    while running and time.monotonic() - begun < PATIENCE:
        child, status = os.waitpid(-1, os.WNOHANG)
        if child == 0:
            time.sleep(0.05)
            continue
        name, rank = running.pop(child)
        results[name][rank] = [os.waitstatus_to_exitcode(status), time.monotonic() - begun]
        left = [child for child, (other, _) in running.items() if other == name]
        if len(left) == 1 and name in STOPPED:
            os.kill(left[0], signal.SIGCONT)  # the others have ended, and it must not go on alone
    for child in running:
        os.kill(child, signal.SIGUSR1)  # it writes down where it stands
        time.sleep(0.5)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return results


if __name__ == "__main__":
    main(Path(sys.argv[1]), WITH_HEARTBEAT if "heartbeat" in sys.argv[2:] else SCENARIOS)
