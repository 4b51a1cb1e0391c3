"""Contenders as teams of processes that train in turn, so that a noisy moment of the machine hits all alike.

A contender is a file of `benchmarks/contenders`. Each rank is a process of its own, which builds its
contender, trains two steps unmeasured, and then trains whenever it is told to.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import json
import multiprocessing
import os
import platform
import resource
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path

from benchmarks.contenders import ActionTime, Shape
from megazero.config.tree.config import Config
from megazero.config.tree.model import ModelConfig
from megazero.config.tree.optimizer import OptimizerConfig
from megazero.config.tree.training import BatchConfig
from megazero.train.observe.host import measure_matmul_rate
from megazero.train.parts.families import family_of
from megazero.train.parts.vocabulary import Vocabulary

WARMUP_STEPS = 2


@dataclass(frozen=True)
class Contender:
    """One way to train the model.

    Attributes:
        module: the file in `benchmarks/contenders`.
        function: the function in it, ``function(shape, rank, world_size, **options) -> step``.
        ranks: the numbers of ranks that it can run on.
        package: the package that must be installed.
        model_ranks: the ranks that share one batch (tensor and pipeline parallelism).
        options: keyword arguments for `function`.
    """

    name: str
    module: str
    function: str
    ranks: tuple[int, ...]
    package: str = "torch"
    model_ranks: int = 1
    options: Mapping[str, object] = field(default_factory=dict)

    def installed(self) -> bool:
        """Whether its package can be imported."""
        return importlib.util.find_spec(self.package.split(".")[0]) is not None


@dataclass(frozen=True)
class Round:
    """What a team did in one of its turns.

    Attributes:
        tokens_per_second: the speed by the slowest rank's clock.
        tokens_per_cpu_second: by the processor time of all ranks, which a busy machine changes less.
        matmul_share: the share of the matmul rate that the same processes reached just before.
        peak: bytes of the largest rank since its process began.
        step_peak: bytes of the largest rank in this turn; None if the system cannot tell.
        loss: the loss that the last step returned on rank 0, in nats.
    """

    tokens_per_second: float
    tokens_per_cpu_second: float
    matmul_share: float
    peak: int
    step_peak: int | None
    loss: float


class Memory:
    """Peak memory of this process in bytes: resident on the host, allocated on a GPU."""

    def __init__(self, device: str):
        self.device = device
        self.highest = 0

    def _life(self) -> int:
        if self.device == "cuda":
            import torch

            return torch.cuda.max_memory_allocated()
        self.highest = max(self.highest, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
        return self.highest

    def start_turn(self) -> None:
        """Reset the peak, so that `peaks` returns that of the turn (Linux, proc(5): clear_refs)."""
        self._life()
        if self.device == "cpu" and sys.platform == "linux":
            Path("/proc/self/clear_refs").write_text("5")

    def peaks(self) -> tuple[int, int | None]:
        """The peaks since the process began, and since the turn began (None if unknown)."""
        turn = None
        if self.device == "cpu" and sys.platform == "linux":
            status = Path("/proc/self/status").read_text()
            turn = 1024 * next(int(line.split()[1]) for line in status.splitlines() if "VmHWM" in line)
        return max(self._life(), turn or 0), turn


def serve(
    connection: Connection,
    contender: Contender,
    shape: Shape,
    place: tuple[int, int],
    threads: int,
    store: str,
) -> None:
    """One rank of one contender, `place` being (rank, ranks): builds its contender, then follows orders."""
    rank, world_size = place
    os.environ["OMP_NUM_THREADS"] = str(threads)
    try:
        import torch

        torch.set_num_threads(threads)
        torch.manual_seed(0)
        if world_size > 1 or contender.package != "torch":
            import torch.distributed as dist

            backend = "nccl" if shape.device == "cuda" else "gloo"
            dist.init_process_group(
                backend, rank=rank, world_size=world_size, store=dist.FileStore(store, world_size)
            )
        module = importlib.import_module(f"benchmarks.contenders.{contender.module}")
        step = getattr(module, contender.function)(shape, rank, world_size, **contender.options)
        loss = step()
        stepped = time.monotonic()
        for _ in range(WARMUP_STEPS - 1):
            loss = step()
        connection.send(("ready", stepped))
        memory = Memory(shape.device)
        while (order := connection.recv()) is not None:
            if order == "action times":
                connection.send(("done", step.take_action_times()))
                continue
            rate = measure_matmul_rate(shape.torch_dtype, shape.device)
            memory.start_turn()
            start, cpu_start = time.perf_counter(), time.process_time()
            for _ in range(order):
                loss = step()
            seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
            connection.send(("done", (seconds, cpu_seconds, rate, *memory.peaks(), loss)))
    except Exception:
        connection.send(("failed", traceback.format_exc()))


class TeamFailed(RuntimeError):
    """A rank of a team raised, or its process ended."""


class Team:
    """The processes of one contender.

    Attributes:
        startup: seconds from starting the processes until each has done its first step.
        rounds: its turns so far.
    """

    def __init__(self, contender: Contender, shape: Shape, ranks: int, threads: int, folder: str):
        context = multiprocessing.get_context("spawn")
        self.contender = contender
        self.tokens_per_step = shape.tokens_per_step * (ranks // contender.model_ranks)
        self.connections: list[Connection] = []
        self.processes: list = []
        self.rounds: list[Round] = []
        self.startup = 0.0
        self._began = time.monotonic()
        for rank in range(ranks):
            here, there = context.Pipe()
            store = str(Path(folder) / contender.name)
            args = (there, contender, shape, (rank, ranks), threads, store)
            process = context.Process(target=serve, args=args, daemon=True)
            process.start()
            there.close()  # so that the process's end is noticed here
            self.connections.append(here)
            self.processes.append(process)

    @property
    def name(self) -> str:
        return self.contender.name

    def await_start(self) -> None:
        """Return when every rank is ready to train.

        Raises:
            TeamFailed: one of them failed.
        """
        self.startup = max(self.answers()) - self._began  # a clock that all processes of the system share

    def answers(self) -> list:
        """The answer of every rank.

        Raises:
            TeamFailed: one of them failed; the others, which may wait for it, are not waited for.
        """
        values: dict[Connection, object] = {}
        while len(values) < len(self.connections):
            for connection in wait([c for c in self.connections if c not in values]):
                rank = self.connections.index(connection)
                try:
                    state, values[connection] = connection.recv()
                except EOFError as error:
                    self.processes[rank].join(10)
                    code = self.processes[rank].exitcode
                    raise TeamFailed(f"{self.name}: the process of rank {rank} ended with {code}") from error
                if state == "failed":
                    raise TeamFailed(f"{self.name}, rank {rank}:\n{values[connection]}")
        return [values[c] for c in self.connections]

    def tell(self, order: int | str) -> list:
        """Give every rank an order (a number of steps, or "action times"), and return the answers."""
        for connection in self.connections:
            connection.send(order)
        return self.answers()

    def run(self, steps: int, flops_per_token: float) -> None:
        """Take a turn of `steps` steps."""
        seconds, cpu_seconds, rates, peaks, step_peaks, losses = zip(*self.tell(steps), strict=True)
        speed = steps * self.tokens_per_step / max(seconds)
        cpu_speed = steps * self.tokens_per_step / sum(cpu_seconds)
        share = speed * flops_per_token / sum(rates)
        step_peak = None if None in step_peaks else max(step_peaks)
        self.rounds.append(Round(speed, cpu_speed, share, max(peaks), step_peak, losses[0]))

    def action_times(self) -> list[ActionTime]:
        """The times of all stages, since they were last asked for."""
        return [record for records in self.tell("action times") for record in records]

    def dismiss(self) -> None:
        """Tell the processes to end."""
        for connection in self.connections:
            with contextlib.suppress(ConnectionError):  # one that failed has left already
                connection.send(None)

    def close(self) -> None:
        """End the processes, by force if they do not end in time."""
        self.dismiss()
        for process in self.processes:
            process.join(10)
            if process.is_alive():
                process.kill()


@contextlib.contextmanager
def started(
    contenders: Sequence[Contender], shape: Shape, ranks: int, threads: int
) -> Iterator[tuple[list[Team], list[str]]]:
    """The teams that started, and the names of those that did not, whose tracebacks are printed."""
    teams: list[Team] = []
    failed: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for contender in contenders:
                team = Team(contender, shape, ranks, threads, folder)
                teams.append(team)
                try:
                    team.await_start()
                except TeamFailed as failure:
                    print(f"{contender.name}: failed to start\n{failure}", file=sys.stderr)
                    failed.append(contender.name)
                    teams.remove(team)
                    team.close()
            yield teams, failed
        finally:
            for team in teams:
                team.dismiss()  # all at once, as each takes a while to leave
            for team in teams:
                team.close()


def take_turns(teams: Sequence[Team], shape: Shape, rounds: int, steps: int) -> None:
    """Let each team take a turn, round after round."""
    config = Config(
        model=ModelConfig(
            family=shape.family,
            num_layers=shape.layers,
            hidden_size=shape.hidden,
            num_attention_heads=shape.heads,
            seq_length=shape.sequence,
        ),
        batch=BatchConfig(micro_batch_size=1),
        optimizer=OptimizerConfig(lr=1.0),
    )
    flops = family_of(config.model).flops_per_token(config, Vocabulary(shape.vocab, shape.vocab, None, None))
    for _ in range(rounds):
        for team in teams:
            team.run(steps, flops)


def present(contenders: Sequence[Contender]) -> list[Contender]:
    """The contenders whose package is installed; the others are named on standard error."""
    for contender in contenders:
        if not contender.installed():
            print(f"{contender.name}: left out, {contender.package} is not installed", file=sys.stderr)
    return [c for c in contenders if c.installed()]


def results(
    teams: Sequence[Team], benchmark: str, settings: Mapping[str, object], baseline: str, *, step_peak: bool
) -> list[dict]:
    """One JSON object per team, with the median of the per-round ratios to the team named `baseline`.

    `step_peak` adds the peak memory of the measured steps to that of the whole process.
    """
    base = next((t for t in teams if t.name == baseline), None)
    lines = []
    for team in teams:
        speeds = [r.tokens_per_second for r in team.rounds]
        line = {
            "benchmark": benchmark,
            "contender": team.name,
            **settings,
            "tokens_per_second": round(statistics.median(speeds), 1),
            "tokens_per_second_rounds": [round(s, 1) for s in speeds],
            "tokens_per_cpu_second": round(
                statistics.median(r.tokens_per_cpu_second for r in team.rounds), 1
            ),
            "matmul_share": round(statistics.median(r.matmul_share for r in team.rounds), 3),
            "peak_mib_per_rank": round(max(r.peak for r in team.rounds) / 2**20),
            "loss": round(team.rounds[-1].loss, 4),
            "machine": f"{platform.machine()} {os.cpu_count()} cpus",
        }
        step_peaks = [r.step_peak for r in team.rounds if r.step_peak is not None]
        if step_peak and step_peaks:
            line["step_peak_mib_per_rank"] = round(max(step_peaks) / 2**20)
        if base is not None:
            for name, unit in (("ratio", "tokens_per_second"), ("cpu_ratio", "tokens_per_cpu_second")):
                both = zip(team.rounds, base.rounds, strict=True)
                ratios = [getattr(own, unit) / getattr(other, unit) for own, other in both]
                line[f"{name}_to_{baseline}"] = round(statistics.median(ratios), 3)
        lines.append(line)
    return lines


def write(lines: Sequence[dict], output: Path | None) -> None:
    """Print JSON lines, and append them to `output`."""
    text = "".join(json.dumps(line) + "\n" for line in lines)
    print(text, end="", flush=True)
    if output:
        with output.open("a") as file:
            file.write(text)


def add_arguments(parser: argparse.ArgumentParser, names: Sequence[str]) -> None:
    """The arguments that every benchmark of contenders takes; `names` are all contenders."""
    parser.add_argument("--dtype", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument(
        "--threads", type=int, default=os.cpu_count(), help="threads in all, shared by the ranks"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="steps per contender and round")
    parser.add_argument(
        "--contenders", nargs="*", choices=names, metavar="NAME", help=f"any of {', '.join(names)}"
    )
    parser.add_argument("--output", type=Path, help="append the JSON lines to this file too")
