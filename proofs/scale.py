"""What a start costs each rank of a large job, counted on a fake world: one rank at a time, on a laptop.

    python proofs/scale.py [--ranks 256,1024,4096,16384] [--json FILE]

The job is the 175B model with 8 tensor-parallel ranks and 16 stages; more ranks are more replicas. The first
rank, one in the middle, and the first and last of the last stage go through the real code of a start: they
plan and open their groups (which move nothing), agree with the others by notes (which a counting store
answers), listen for signs of life, are built on the meta device, and describe what they would write. The
description of a checkpoint is folded by all ranks of the job, one after the other; then a rank looks up what
it would read at a resume, on the same layout and on others.

Each row is the most that any of these ranks has or does. A table for docs/scale.md follows, with the growth
from the smallest to the largest job in the row's unit per rank.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
import tracemalloc
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from megazero.checkpoint import directory as directory_module
from megazero.checkpoint.blocks import BLOCK, FileRecord
from megazero.checkpoint.by_parts import PartDescription
from megazero.checkpoint.directory import DirectoryInParts, ReaderRank, Wanted
from megazero.checkpoint.disk import Disk
from megazero.checkpoint.manifest import INDEX, MANIFEST, Manifest, read_manifest
from megazero.checkpoint.part import Part
from megazero.checkpoint.parts_writer import Tally, describe, fold, write_contents
from megazero.checkpoint.safetensors_header import NAME_OF_DTYPE
from megazero.checkpoint.shards import parts_to_read, parts_to_write
from megazero.checkpoint.writer import Written, WrittenPiece, file_name, sort_of
from megazero.config.resolve import parse_config
from megazero.config.training_plan import training_plan_of
from megazero.mpu.agreement import agree_by_notes
from megazero.mpu.attempt_store import store_of_attempt
from megazero.mpu.communicators import second_communicators
from megazero.mpu.context import ParallelContext
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.group import DONE, Group, Transfer, Work
from megazero.mpu.launch import grid_of
from megazero.mpu.messages import fold_values
from megazero.mpu.still_group import StillGroup
from megazero.mpu.traffic import TrafficLog, recording_context
from megazero.mpu.tree import pause_of, tiers
from megazero.mpu.waits import Waited
from megazero.mpu.watch.heartbeat import Heartbeat
from megazero.mpu.watch.report import Alarm, ChannelRecord, Report
from megazero.train.build import build_model
from megazero.train.guards.agreement import settings_and_code
from megazero.train.observe.stragglers import Stragglers
from megazero.train.parts.vocabulary import build_vocabulary
from megazero.zero.bucket import Bucket
from megazero.zero.layout import BucketLayout
from megazero.zero.optimizer import Optimizer
from megazero.zero.plan import BucketKey

GPT_175B = (
    "--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 --hidden-dropout 0 "
    "--attention-dropout 0 --sequence-parallel --num-layers-per-virtual-pipeline-stage 3 --zero-stage 1 "
    "--micro-batch-size 1 --lr 6e-5 --train-iters 100 --bf16 --vocab-size 50257 --mock-data"
)
SAVE = "0123456789abcdef"


@dataclass(frozen=True)
class Job:
    """A job of any size: more ranks are more replicas.

    Attributes:
        flags: of the training, without sizes of axes and batch.
        tensor, stages: the sizes of these axes.
        micro_batches: of each replica in a step.
    """

    flags: str = GPT_175B
    tensor: int = 8
    stages: int = 16
    micro_batches: int = 16

    def config(self, ranks: int) -> Any:
        """The configuration on so many ranks."""
        replicas = ranks // (self.tensor * self.stages)
        sizes = f"--tensor-model-parallel-size {self.tensor} --pipeline-model-parallel-size {self.stages}"
        batch = f"--global-batch-size {replicas * self.micro_batches}"
        return parse_config(f"{self.flags} {sizes} {batch}".split(), world_size=ranks).config

    def built(self, ranks: int, rank: int) -> tuple[Optimizer, ParallelContext]:
        """The optimizer of a rank, on the meta device."""
        config = self.config(ranks)
        grid = grid_of(config.parallel, ranks)
        context = recording_context(grid, rank, TrafficLog())
        engine = build_model(build_vocabulary(config), context, config, training_plan_of(config, grid.dp))
        return engine.optimizer, context


def held(make: Callable[[], Any]) -> tuple[float, int]:
    """Seconds that a call takes, and the bytes that Python holds for its result."""
    make()  # what a first call imports and keeps
    gc.collect()
    tracemalloc.start()
    began = time.process_time()
    result = make()
    seconds = time.process_time() - began
    gc.collect()
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    del result
    return seconds, size


def peak(work: Callable[[], Any]) -> tuple[float, int]:
    """Seconds that a call takes, and the most bytes that Python holds meanwhile."""
    began = time.process_time()
    work()
    seconds = time.process_time() - began
    tracemalloc.start()
    work()
    size = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return seconds, size


# Groups.


def groups(job: Job, ranks: int, rank: int) -> dict[str, float]:
    """Opening a rank's groups."""
    grid = grid_of(job.config(ranks).parallel, ranks)
    seconds = second_communicators(grid, 1)
    took, size = held(lambda: recording_context(grid, rank, TrafficLog(), seconds=seconds))
    plan = recording_context(grid, rank, TrafficLog(), seconds=seconds).plan
    opened = [c for c in plan.communicators if len(c.ranks) > 1]
    label = "group `world`"
    channels = {c.name: ChannelRecord(label, c.ranks, 0) for c in opened}
    report = Report(rank, "host", 0.0, Alarm.TOLD, "", channels, (), ())
    return {
        "groups: seconds": took,
        "groups: bytes": size,
        "groups: communicators": len(opened),
        "groups: members listed to torch": sum(len(c.ranks) for c in opened if len(c.ranks) < ranks),
        "groups: connections on the host": sum(len(tier) - 1 for tier in tiers(rank, ranks)),
        "groups: bytes of a failed rank's report": len(report.to_json()),
    }


# Notes and the store.


class CountedNotes:
    """Notes that answer as equal ranks would, and count what they are asked."""

    def __init__(self) -> None:
        self.calls = self.keys = 0
        self.texts: dict[str, str] = {}

    def post(self, key: str, text: str) -> None:
        self.calls += 1
        self.keys += 1
        self.texts["digest" if "digest/" in key else key] = text

    def read(self, key: str) -> str | None:
        return self.read_all([key])[0]

    def read_all(self, keys: Sequence[str]) -> list[str | None]:
        self.calls += 1
        self.keys += len(keys)
        return [self._text(key) for key in keys]

    def _text(self, key: str) -> str | None:
        answers = {"agreement/verdict": "same", "trouble": None}
        if key in answers:
            return self.texts.get(key, answers[key])
        if key.startswith("beat/"):
            return json.dumps([self.calls, "host"])
        return self.texts["digest"]


class CountedStore(dist.HashStore):  # type: ignore[misc,name-defined]  # torch exports it without saying so
    """A store in which every child has asked for its attempt's name, and has heard it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.attempt = "attempt"

    def set(self, key: str, value: str) -> None:
        self.calls += 1
        if key.startswith("answer/"):
            self.attempt = value

    def check(self, keys: list[str]) -> bool:
        self.calls += 1
        return True

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        self.calls += 1

    def get(self, key: str) -> bytes:
        self.calls += 1
        return b"word" if key.startswith("asks/") else self.attempt.encode()


def notes(job: Job, ranks: int, rank: int) -> dict[str, float]:
    """What a rank asks of the store at the start, and then every second."""
    store = CountedStore()
    store_of_attempt(store, rank, ranks, timedelta(seconds=10))
    job_notes = CountedNotes()
    facts = settings_and_code(job.config(ranks))
    job_notes.texts["digest"] = "[]"
    agree_by_notes(job_notes, rank, ranks, facts, 10.0)  # leaves the digest of equal ranks
    job_notes.calls = job_notes.keys = 0
    agree_by_notes(job_notes, rank, ranks, facts, 10.0)
    agreement = job_notes.calls
    job_notes.calls = job_notes.keys = 0
    heart = Heartbeat(job_notes, rank, ranks, "host, process 1", 60.0)
    for _ in range(600):
        heart.turn(1.0)
    beats = job_notes.calls / 600
    _, size = held(lambda: _listening(job_notes, ranks, rank))
    return {
        "store: calls to name the attempt": store.calls,
        "store: calls to agree on the settings": agreement,
        "store: calls per second, all ranks": ranks * (beats + 1 / pause_of(1.0, ranks, 4000)),
        "store: bytes of what a rank has heard": size,
    }


def _listening(job_notes: CountedNotes, ranks: int, rank: int) -> Heartbeat:
    heart = Heartbeat(job_notes, rank, ranks, "host, process 1", 60.0)
    heart.turn(1.0)
    return heart


def slow_ranks(job: Job, ranks: int, rank: int) -> dict[str, float]:
    """A comparison of the times of all ranks."""
    grid = grid_of(job.config(ranks).parallel, ranks)
    context: Any = SimpleNamespace(grid=grid, world_size=ranks, rank=rank, watch=object())
    stragglers = Stragglers(1, context)

    def compare() -> None:
        for iteration in (1, 2):
            stragglers.add(1.0, 0.1, Waited(0.1))
            stragglers.slots(iteration)
            stragglers.after(iteration, [0.9, 0.1, 0.1] * ranks)

    seconds, size = peak(compare)
    return {"slow ranks: seconds of a comparison": seconds / 2, "slow ranks: bytes of a comparison": size}


# The description of a checkpoint.


@dataclass(frozen=True, eq=False)
class OtherBucket:
    """A bucket of another replica's rank, which has the same sizes."""

    layout: BucketLayout
    of: Bucket

    @property
    def key(self) -> BucketKey:
        return self.of.key


def at_replica(optimizer: Optimizer, number: int) -> Any:
    """The optimizer of a rank of another replica at the same place of the model, as far as writing asks."""
    places = [OtherBucket(replace(bucket.layout, rank=number), bucket) for bucket in optimizer.store.buckets]
    store = SimpleNamespace(
        buckets=places, at_rest=lambda place: optimizer.store.at_rest(place.of), offloaded={}
    )
    return SimpleNamespace(
        store=store, private_kinds=optimizer.private_kinds, rule=optimizer.rule, delayed=optimizer.delayed
    )


def written_by(parts: Sequence[Part], rank: int, ranks: int) -> Written:
    """What a rank would have written, with made-up hashes."""
    sizes: dict[str, int] = defaultdict(int)
    entries = []
    for part in parts:
        if part.box.numel:
            name = file_name(sort_of(part.key), rank, ranks)
            sizes[name] += part.tensor.numel() * part.tensor.element_size()
            entries.append(
                WrittenPiece(part.key, NAME_OF_DTYPE[part.tensor.dtype], part.shape, part.box, name)
            )
    files = {name: FileRecord(size, (SAVE,) * -(-size // BLOCK)) for name, size in sizes.items()}
    return Written(files, entries)


@dataclass
class World:
    """All ranks of a job, as far as their parts of a checkpoint go; one of each place is built."""

    job: Job
    ranks: int

    def __post_init__(self) -> None:
        self.grid: ProcessGrid = grid_of(self.job.config(self.ranks).parallel, self.ranks)
        self._built: dict[tuple[int, int], tuple[Optimizer, ParallelContext]] = {}

    def parts(self, rank: int) -> list[Part]:
        """What a rank writes."""
        place = self.grid.place(rank)
        model = place.index("pp"), place.index("tp")
        if model not in self._built:
            self._built[model] = self.job.built(self.ranks, rank)
        optimizer, context = self._built[model]
        return parts_to_write(at_replica(optimizer, place.index("dp")), context)

    def description(self, rank: int) -> tuple[PartDescription, list[Tally]]:
        """A rank's part of the description, and what it passes on."""
        return describe(written_by(self.parts(rank), rank, self.ranks), SAVE, rank)


class MailGroup(StillGroup):
    """A member of a group whose messages wait in `mail` until their receiver is played."""

    def __init__(self, rank: int, ranks: range, mail: dict[tuple[int, int], deque[torch.Tensor]]):
        super().__init__("world", rank, ranks)
        self.mail = mail
        self.received = 0

    def exchange(self, transfers: Sequence[Transfer]) -> list[Work]:
        for transfer in transfers:
            if transfer.kind == "send":
                self.mail[self.rank, transfer.peer].append(transfer.tensor.clone())
            else:
                transfer.tensor.copy_(self.mail[transfer.peer, self.rank].popleft())
                self.received += transfer.tensor.nbytes
        return [DONE] * len(transfers)


def folded(world: World) -> tuple[list[Tally], dict[str, float]]:
    """Fold the tallies of all ranks, the last one first, as they send to lower ranks alone."""
    mail: dict[tuple[int, int], deque[torch.Tensor]] = defaultdict(deque)
    most, seconds, result = 0, 0.0, None
    for rank in reversed(range(world.ranks)):
        group: Group = MailGroup(rank, range(world.ranks), mail)
        tallies = world.description(rank)[1]
        began = time.process_time()
        result = fold_values(group, tallies, fold)
        seconds = time.process_time() - began
        most = max(most, group.received) if rank else most
        received = group.received
    facts = {
        "save: bytes the first rank receives": received,
        "save: bytes another rank receives": most,
        "save: seconds the first rank folds": seconds,
    }
    return result, facts


def saving(world: World, folder: Path) -> dict[str, float]:
    """Saving: what ranks write, and what the first rank does besides."""
    facts: dict[str, float] = defaultdict(float)
    for rank in played(world.job, world.ranks):
        seconds, _ = held(lambda rank=rank: world.parts(rank))
        part = world.description(rank)[0]
        row = {
            "save: seconds to list a rank's parts": seconds,
            "save: bytes of a rank's part": len(part.model_dump_json()),
            "save: pieces of a rank": sum(len(tensor.pieces) for tensor in part.tensors),
            "save: files of a rank": len(part.files) + 1,
        }
        facts |= {name: max(facts[name], value) for name, value in row.items()}
    tallies, of_fold = folded(world)
    write_contents(Disk(), folder, 1, tallies, {}, SAVE, world.ranks)
    facts |= of_fold
    facts["save: bytes of the index"] = (folder / INDEX).stat().st_size
    facts["save: bytes of the manifest"] = (folder / MANIFEST).stat().st_size
    return dict(facts)


def resuming(world: World, folder: Path) -> dict[str, float]:
    """Resuming: the parts of the description that a rank reads."""
    manifest, content = read_manifest(folder), (folder / INDEX).read_bytes()
    jobs = {
        "same layout": (world.job, world.ranks),
        "half the replicas": (world.job, world.ranks // 2),
        "half the tensor-parallel ranks": (replace(world.job, tensor=world.job.tensor // 2), world.ranks),
        "half the stages": (replace(world.job, stages=world.job.stages // 2), world.ranks),
    }
    reads: list[int] = []

    def described(folder: Path, manifest: Manifest, number: int) -> PartDescription:
        reads.append(number)
        return world.description(number)[0]

    facts: dict[str, float] = defaultdict(float)
    real, directory_module.read_part = directory_module.read_part, described
    try:
        for rank in played(world.job, world.ranks):
            for name, (job, ranks) in jobs.items():
                reads.clear()
                reader = rank * ranks // world.ranks
                optimizer, context = job.built(ranks, reader)
                wanted = [Wanted(part.key, part.box) for part in parts_to_read(optimizer, context)]
                directory = DirectoryInParts(folder, manifest, content, ReaderRank.of(context))
                directory.find(wanted)
                row = f"resume: parts read, {name}"
                facts[row] = max(facts[row], len(reads))
        _, facts["resume: bytes of the open index"] = held(
            lambda: DirectoryInParts(folder, manifest, content, ReaderRank())
        )
    finally:
        directory_module.read_part = real
    return dict(facts)


def played(job: Job, ranks: int) -> tuple[int, ...]:
    """The ranks that are played: the first, one in the middle, the first and the last of the last stage."""
    return 0, ranks // 2 + 3, ranks - ranks // job.stages, ranks - 1


def measure(job: Job, ranks: int) -> dict[str, float]:
    """All rows for a job of so many ranks."""
    facts: dict[str, float] = defaultdict(float)
    for rank in played(job, ranks):
        for part in (groups, notes, slow_ranks):
            for name, value in part(job, ranks, rank).items():
                facts[name] = max(facts[name], value)
    with tempfile.TemporaryDirectory() as folder:
        world = World(job, ranks)
        facts |= saving(world, Path(folder))
        facts |= resuming(world, Path(folder))
    return dict(facts)


def table(measured: dict[int, dict[str, float]]) -> Iterator[str]:
    """The rows as Markdown, with their growth per rank."""
    sizes = sorted(measured)
    yield f"| | {' | '.join(f'{ranks:,}' for ranks in sizes)} | per rank |"
    yield "|---|" + "---:|" * (len(sizes) + 1)
    for name in measured[sizes[0]]:
        values = [measured[ranks][name] for ranks in sizes]
        growth = (values[-1] - values[0]) / (sizes[-1] - sizes[0])
        cells = [*map(shown, values), shown(growth) if abs(growth) > 5e-3 else "-"]
        yield f"| {name} | {' | '.join(cells)} |"


def shown(value: float) -> str:
    """A number to three digits or so."""
    return f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:.2g}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", default="256,1024,4096,16384", help="sizes of the job")
    parser.add_argument("--json", type=Path, help="write the numbers here")
    args = parser.parse_args()
    measured = {ranks: measure(Job(), ranks) for ranks in map(int, args.ranks.split(","))}
    print("\n".join(table(measured)))
    if args.json is not None:
        args.json.write_text(json.dumps(measured, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
