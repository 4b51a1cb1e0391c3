"""1-bit Adam and 0/1 Adam against exact Adam: time on a slow wire, bytes, and how well the model learns.

    python -m benchmarks.compressed_adam --steps 8 --learning-steps 600

Two processes over Gloo train a network that predicts the next symbol of a random Markov chain. For the
times, every call waits as long as its bytes take on a wire of `--mbit` per second in each direction (one
call's bytes after another's, beside whatever is computed meanwhile); steps after the freeze are measured.
For learning, the wire is not slowed, the network is smaller, and the loss is that of symbols never trained
on. One JSON line for each optimizer.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megazero.mpu.context import make_context
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.group import Group, Work
from megazero.mpu.traffic import TrafficLog, count_traffic
from megazero.mpu.wrapping_group import GroupCall, WrappingGroup
from megazero.optim.compressed.onebit_adam import OnebitAdam
from megazero.optim.compressed.zero_one_adam import ZeroOneAdam, ZeroOneSteps
from megazero.optim.elementwise import Adam
from megazero.optim.rule import UpdateRule
from megazero.zero.build import build_store
from megazero.zero.optimizer import Optimizer
from megazero.zero.parallel import DataParallel
from megazero.zero.policy import ZeroPolicy
from megazero.zero.unit import module_units

RANKS, BATCH, CONTEXT, SYMBOLS = 2, 128, 4, 32
TIMEOUT = timedelta(seconds=300)


class SlowGroup(WrappingGroup):
    """A group whose calls take as long as their bytes on a wire of a given speed.

    A call's bytes are those that each rank of a ring sends: of an all-reduce 2 (N - 1) / N of the tensor, of
    the others (N - 1) / N of the larger side.

    Args:
        inner: the group that communicates.
        bytes_per_second: speed of the wire; each direction has it.
    """

    def __init__(self, inner: Group, bytes_per_second: float):
        super().__init__(inner)
        self.bytes_per_second = bytes_per_second
        self._free = 0.0

    def _collective(self, call: GroupCall) -> Work:
        share = (self.size - 1) / self.size * (2 if call.operation == "all_reduce" else 1)
        seconds = share * call.payload.numel() * call.payload.element_size() / self.bytes_per_second
        self._free = max(self._free, time.monotonic()) + seconds
        work = _Until(call.start(self.inner), self._free)
        if not call.async_op:
            work.wait()
        return work


class _Until:
    """A call that is over at a time at the earliest."""

    def __init__(self, work: Work, end: float):
        self.work, self.end = work, end

    def wait(self) -> None:
        self.work.wait()
        time.sleep(max(0.0, self.end - time.monotonic()))


class Network(nn.Module):
    """Logits of the next symbol from the last few."""

    def __init__(self, width: int):
        super().__init__()
        torch.manual_seed(1)
        self.symbols = nn.Embedding(SYMBOLS, 32)
        self.layers = nn.Sequential(
            nn.Linear(32 * CONTEXT, width), nn.GELU(), nn.Linear(width, width), nn.GELU(),
            nn.Linear(width, SYMBOLS),
        )  # fmt: skip

    def forward(self, context: Tensor) -> Tensor:
        return self.layers(self.symbols(context).flatten(1))


def chain(length: int, seed: int) -> Tensor:
    """Symbols of a Markov chain whose next symbol depends on the last two."""
    last, before = torch.randn(2, SYMBOLS, SYMBOLS, generator=torch.Generator().manual_seed(0))
    generator, found = torch.Generator().manual_seed(seed), torch.zeros(length, 1024, dtype=torch.long)
    for row in range(2, length):
        chances = (2.0 * last[found[row - 1]] + before[found[row - 2]]).softmax(-1)
        found[row] = torch.multinomial(chances, 1, generator=generator).view(-1)
    return found.t().contiguous()


def samples(text: Tensor, seed: int, count: int) -> tuple[Tensor, Tensor]:
    """Contexts [count, CONTEXT] and what follows each."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(len(text), (count,), generator=generator)
    places = torch.randint(8, text.shape[1] - CONTEXT, (count,), generator=generator)
    windows = text[rows[:, None], places[:, None] + torch.arange(CONTEXT + 1)]
    return windows[:, :-1], windows[:, -1]


class Training:
    """A network, trained by a rule over the replicas of a context."""

    def __init__(self, rule: UpdateRule, context, width: int, text: Tensor):
        self.model, self.text, self.context = Network(width), text, context
        units = module_units(self.model)
        policy = ZeroPolicy(needs=rule.needs)
        store = build_store(units, policy, context)
        self.parallel = DataParallel(units, store, policy, context)
        self.optimizer = Optimizer(store, rule, context, 1.0)

    def step(self, number: int, lr: float) -> None:
        """One step on this replica's samples."""
        replica = self.context.replica
        contexts, following = samples(self.text, number * replica.size + replica.rank, BATCH)
        self.parallel.start()
        self.parallel.gather(0)
        loss = F.cross_entropy(self.model(contexts), following)
        self.parallel.begin_backward(0, reduce=True)
        loss.backward()
        self.parallel.end_backward()
        self.parallel.release(0)
        self.parallel.finish()
        self.optimizer.step(lr, 0.01, 1.0 / replica.size)

    @torch.no_grad()
    def loss(self, text: Tensor) -> float:
        """The mean loss of the weights in use on other symbols."""
        contexts, following = samples(text, 12345, 20000)
        return float(F.cross_entropy(self.model(contexts), following))


def rank_main(rank: int, store: str, args: argparse.Namespace, results) -> None:
    """Measure everything as one of the ranks; the first one reports."""
    import torch.distributed as dist

    from megazero.mpu.torch_group import leave_world, open_group, start_world

    torch.set_num_threads(1)
    start_world("gloo", rank, RANKS, TIMEOUT, store=dist.FileStore(store, RANKS))
    opened: dict[tuple[int, ...], Group] = {}

    def context_of(bytes_per_second: float = float("inf")):
        def maker(name: str, ranks: tuple[int, ...]) -> Group:
            if ranks not in opened:
                opened[ranks] = open_group(name, rank, ranks, TIMEOUT)
            return SlowGroup(opened[ranks], bytes_per_second)

        return make_context(ProcessGrid(dp=RANKS), rank, torch.device("cpu"), maker)

    text, unseen = chain(40, 3), chain(40, 4)
    late = args.learning_steps // 5
    contenders = {
        "adam": (Adam(), Adam()),
        "onebit-adam": (OnebitAdam(2), OnebitAdam(late)),
        "zero-one-adam": (
            ZeroOneAdam(ZeroOneSteps(2, local_step_scaler=1, local_step_clipper=4)),
            ZeroOneAdam(ZeroOneSteps(late, local_step_scaler=late, local_step_clipper=4)),
        ),
    }
    for name, (timed, learning) in contenders.items():
        log = TrafficLog()
        context = count_traffic(context_of(args.mbit * 1e6 / 8), log)
        training, times = Training(timed, context, args.width, text), []
        for number in range(args.steps + 4):
            log.clear()
            if number == 4:
                payload, log.payload = 0, log.payload
            context.world.barrier()
            started = time.perf_counter()
            training.step(number, 1e-3)
            if number >= 4:
                times.append(time.perf_counter() - started)
                payload += sum(
                    size * (2 if operation == "all_reduce" else 1)
                    for (_, operation), size in log.payload.items()
                )
        trained = Training(learning, context_of(), args.learning_width, text)
        for number in range(args.learning_steps):
            trained.step(number, 2e-3 * (1 - number / args.learning_steps))
        if rank == 0:
            results.put(
                {
                    "optimizer": name,
                    "parameters": sum(p.numel() for p in training.model.parameters()),
                    "mbit": args.mbit,
                    "seconds": round(statistics.median(times), 4),
                    "mean_seconds": round(statistics.mean(times), 4),
                    "moved_bytes": payload * (RANKS - 1) // RANKS // args.steps,
                    "loss": round(trained.loss(unseen), 4),
                }
            )
        context.world.barrier()
    leave_world()


def measure(args: argparse.Namespace) -> list[dict]:
    """What each optimizer took and learned."""
    os.environ["OMP_NUM_THREADS"] = "1"
    spawn = multiprocessing.get_context("spawn")
    results = spawn.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        ranks = [spawn.Process(target=rank_main, args=(r, store, args, results)) for r in range(RANKS)]
        for process in ranks:
            process.start()
        found = [results.get(timeout=600) for _ in range(3)]
        for process in ranks:
            process.join()
    exact = found[0]
    for each in found:
        each["times_faster"] = round(exact["mean_seconds"] / each["mean_seconds"], 2)
        each["times_fewer_bytes"] = round(exact["moved_bytes"] / each["moved_bytes"], 1)
        each["nats_more"] = round(each["loss"] - exact["loss"], 4)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=8, help="steps measured")
    parser.add_argument("--width", type=int, default=1536, help="of the network whose steps are timed")
    parser.add_argument("--mbit", type=float, default=100.0, help="speed of the wire")
    parser.add_argument("--learning-steps", type=int, default=1500)
    parser.add_argument("--learning-width", type=int, default=128)
    for each in measure(parser.parse_args()):
        print(json.dumps(each), flush=True)


if __name__ == "__main__":
    main()
