"""kill -9 at any moment of a run, then a resume: the end must equal that of an uninterrupted run.

    python proofs/kill_sweep.py --points 200 [--layout NAME] [--jobs 2] [--output FILE]

Every point trains a small GPT or BERT on four Gloo ranks, on two blended corpora, with dropout and a growing
batch; a BERT masks tokens anew in every sample.
It saves every third iteration, in line or in the background, with or without pruning. It is killed: one rank
or the whole job at a random moment, or one rank at a change of the file system (before it, or within a
write), so that the points go through every change that the ranks make for one save. Survivors are ended as a
launcher would. The same command then continues to the end, and these must hold:

- what ``latest`` named after the kill loads, and is what the run continued from;
- no more work is lost than one save interval, or two if saves may still be on their way;
- the losses and gradient norms of all iterations, and the hashes of all logical tensors of the last
  checkpoint (parameters, moments, every generator's state) equal the uninterrupted run's;
- where state was offloaded to disk, nothing is left of it.

A table of the kinds of points follows; the exit status is 1 if one failed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

# Ranks are forked, so libraries must not have started threads by then.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from xxhash import xxh3_64

from megazero.checkpoint.disk import Disk
from megazero.checkpoint.folder import candidates, latest_iteration
from megazero.checkpoint.reader import CheckpointReader
from megazero.checkpoint.tensor_file import memory_of
from megazero.data.indexed.writer import IndexedDatasetWriter
from megazero.errors import CheckpointError
from proofs.kill_job import PATIENCE, Job
from tests.checkpoint.faulty_disk import Counter, FaultyDisk, StopAt, kill

RANKS = 4
ITERATIONS = 12
INTERVAL = 3

COMMON = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 "
    "--hidden-dropout 0.1 --attention-dropout 0.1 --micro-batch-size 2 --global-batch-size 8 "
    "--rampup-batch-size 4 4 24 --lr 1e-3 --lr-warmup-iters 3 --lr-decay-style cosine --eval-iters 0 "
    f"--split 1,0,0 --log-interval 100 --train-iters {ITERATIONS} --save-interval {INTERVAL} --num-workers 2"
)
LAYOUTS = {
    "t2d2": "--vocab-size 64 --tensor-model-parallel-size 2 --zero-stage 1 --fp16 --initial-loss-scale 4096",
    "p2d2": "--vocab-size 64 --pipeline-model-parallel-size 2 --zero-stage 2 --bf16",
    "bert": "--model-family bert --tokenizer-type BertWordPieceCase --optimizer lamb "
    "--pipeline-model-parallel-size 2 --zero-stage 1",
    "experts": "--vocab-size 64 --num-experts 4 --tensor-model-parallel-size 2 --zero-stage 2 --bf16 "
    "--expert-model-parallel-size 4 --expert-tensor-parallel-size 1 "
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 0.02 "
    "--moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 0.05",
    "disk": "--vocab-size 64 --tensor-model-parallel-size 2 --zero-stage 3 --bf16 "
    "--zero-param-persistence-threshold 0 --offload-optimizer nvme --offload-parameters nvme",
}
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
WAYS = ((True, 1, "cyclic"), (False, None, "single"), (False, 2, "cyclic"), (True, None, "single"))


@dataclass(frozen=True)
class Variant:
    """What is trained, and how it is saved."""

    layout: str
    in_background: bool
    keep_last: int | None
    sampler: str

    def flags(self, data: Path, folder: Path) -> list[str]:
        """The command line, which starts and continues the run in `folder`."""
        saving = ["--async-save"] * self.in_background
        saving += [] if self.keep_last is None else ["--keep-last", str(self.keep_last)]
        return [
            *COMMON.split(),
            *LAYOUTS[self.layout].split(),
            *(("--vocab-file", str(data / "vocab.txt")) if self.layout == "bert" else ()),
            *(("--offload-path", str(data)) if self.layout == "disk" else ()),
            *(
                "--data-path",
                "0.7",
                str(data / "a"),
                "0.3",
                str(data / "b"),
                "--dataloader-type",
                self.sampler,
            ),
            *("--save", str(folder / "run"), "--load", str(folder / "run"), *saving),
            *("--metrics-jsonl", str(folder / "metrics.jsonl")),
        ]


def variants(layouts: Sequence[str], points: int) -> list[Variant]:
    """All ways to save on each layout; only one each if there are few points, as each costs a whole run."""
    if points < 40:
        return [Variant(layout, *way) for layout, way in zip(layouts, WAYS, strict=False)]
    return [Variant(layout, *way) for layout in layouts for way in WAYS]


@dataclass(frozen=True)
class Point:
    """One kill.

    Attributes:
        variant: what is killed.
        victim: the rank, or None for all of them.
        iteration: the iteration under way at the kill; for a change, the one that is being saved.
        delay: the share of an iteration's time until the kill, or None for a change.
        change: the number of the victim's change of the file system within the run.
        what: the name of that change.
        half: whether half of the bytes are written first.
        number: the number of the point.
    """

    variant: Variant
    victim: int | None
    iteration: int
    delay: float | None = None
    change: int | None = None
    what: str = ""
    half: bool = False
    number: int = -1

    @property
    def kind(self) -> str:
        """Its row of the table."""
        if self.change is not None:
            return f"{'within' if self.half else 'before'} {self.what}"
        return "whole job" if self.victim is None else "one rank"


@dataclass(frozen=True)
class Made:
    """A change of the file system: its name, the file's without numbers that vary, the iteration saved."""

    name: str
    file: str
    saved: int


@dataclass(frozen=True)
class Reference:
    """An uninterrupted run.

    Attributes:
        end: what `fingerprint` returns for it.
        changes: each rank's changes, in order.
        seconds: the time per iteration.
    """

    end: Mapping[str, object]
    changes: list[list[Made]]
    seconds: float


def fingerprint(folder: Path) -> dict[str, object]:
    """A finished run's curve, and its last checkpoint's counters and hashes of all tensors."""
    reader = CheckpointReader(folder / "run" / f"iter_{ITERATIONS:07d}")
    tensors = {
        str(key): xxh3_64(memory_of(reader.tensor(key).contiguous())).hexdigest() for key in reader.shapes
    }
    return {
        "curve": [(r["iteration"], r["lm_loss"], r["grad_norm"], r["loss_scale"]) for r in metrics(folder)],
        "tensors": tensors,
        "counters": {name: reader.facts[name] for name in ("state", "scaler", "updates", "stream_seed")},
    }


def metrics(folder: Path) -> list[dict]:
    """The iterations that rank 0 has reported."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def differences(expected: Mapping[str, object], found: Mapping[str, object]) -> list[str]:
    """Which parts of two fingerprints differ, in words."""
    wrong = [name for name in ("curve", "counters") if expected[name] != found[name]]
    a, b = expected["tensors"], found["tensors"]
    wrong += [name for name in sorted({*a, *b}) if a.get(name) != b.get(name)]
    return [f"{', '.join(wrong[:5])} differ"] if wrong else []


def refer(variant: Variant, data: Path, folder: Path) -> Reference:
    """Run a variant to its end."""
    folder.mkdir()
    disks = [FaultyDisk(Counter()) for _ in range(RANKS)]
    Job(variant.flags(data, folder), folder, 1000, disks).finish()
    changes = []
    for rank in range(RANKS):
        saved, mine = 0, []
        for name, path in json.loads((folder / f"changes{rank}.json").read_text()):
            started = re.search(r"\.iter_(\d{7})\.partial", path)
            saved = int(started[1]) if started else saved
            file = re.sub(r"\d{7}|\b[0-9a-f]{16}\b", "*", os.path.relpath(path, folder))
            mine.append(Made(name, file, saved))
        changes.append(mine)
    seconds = sorted(record["seconds"] for record in metrics(folder))[ITERATIONS // 2]
    return Reference(fingerprint(folder), changes, seconds)


def choose(references: Mapping[Variant, Reference], count: int, seed: int) -> Iterator[Point]:
    """The points: three of four at changes, going through all that a save makes; others at random moments."""
    chance = random.Random(seed)
    layouts = list(dict.fromkeys(variant.layout for variant in references))
    turns = {}
    for layout in layouts:
        moments = _moments({v: r for v, r in references.items() if v.layout == layout})
        chance.shuffle(moments)
        turns[layout] = itertools.cycle(moments)
    for number in range(count):
        layout = layouts[number % len(layouts)]
        if number // len(layouts) % 4 < 3:
            point = chance.choice(next(turns[layout]))
        else:
            variant = chance.choice([each for each in references if each.layout == layout])
            victim = chance.choice([None, *range(RANKS)])
            point = Point(variant, victim, chance.randrange(ITERATIONS), delay=chance.random())
        yield replace(point, number=number)


def _moments(references: Mapping[Variant, Reference]) -> list[list[Point]]:
    """For each change that a rank makes for a save, and for each half of a write: where it occurs."""
    found: dict[tuple, list[Point]] = {}
    for variant, reference in references.items():
        for rank, changes in enumerate(reference.changes):
            for number, made in enumerate(changes):
                for half in (False, True) if made.name == "write" else (False,):
                    point = Point(variant, rank, made.saved, change=number, what=made.name, half=half)
                    found.setdefault((rank, made.name, made.file, half), []).append(point)
    return list(found.values())


def attempt(point: Point, reference: Reference, data: Path, folder: Path) -> dict[str, object]:
    """Kill a run at a point and continue it; returns what was found."""
    folder.mkdir()
    begun, problems = time.monotonic(), []
    flags = point.variant.flags(data, folder)
    disks: list[Disk | None] = [None] * RANKS
    if point.change is not None:
        disks[point.victim] = FaultyDisk(StopAt(point.change, point.half, end=kill))
    job = Job(flags, folder, 1000, disks)
    if point.change is None:
        _wait_for(job, folder, point, reference.seconds)
        job.send(signal.SIGKILL, point.victim)
    else:
        while not job.statuses and time.monotonic() < begun + PATIENCE:
            time.sleep(0.005)
            job.poll()
    job.end()
    if point.change is not None and job.statuses[point.victim] != -signal.SIGKILL:
        problems.append(f"rank {point.victim} should be killed, but ended with {job.statuses[point.victim]}")
    reached = max((record["iteration"] for record in metrics(folder)), default=0)
    named = latest_iteration(folder / "run")
    problems += _unloadable(folder / "run", named)
    # Different states of the generators than the first time, unless there is nothing to set them from.
    again = Job(flags, folder, 1000 if named is None else 2000, [None] * RANKS)
    loaded = 0
    try:
        again.finish()
        said = again.said(0)
        loaded = next((i for i in range(ITERATIONS, 0, -1) if f"loaded {folder}/run/iter_{i:07d}" in said), 0)
        if loaded != (named or loaded) or "passed over" in said:
            problems.append(f"iteration {named} was named and {loaded} loaded")
        problems += differences(reference.end, fingerprint(folder))
    except (RuntimeError, CheckpointError) as error:
        problems.append(str(error))
    lost = reached - loaded
    if lost > INTERVAL * (2 if point.variant.in_background else 1):
        problems.append(f"{lost} iterations were lost")
    if left := [p.name for p in (folder / "run").iterdir() if p.name.startswith(".") and p.name != ".lock"]:
        problems.append(f"{', '.join(left)} was left")
    facts = {"kind": point.kind, "reached": reached, "loaded": loaded, "lost": lost, "problems": problems}
    return asdict(point) | facts | {"seconds": round(time.monotonic() - begun, 2)}


def _wait_for(job: Job, folder: Path, point: Point, seconds: float) -> None:
    """Wait until the moment of the kill, or the end."""
    deadline = time.monotonic() + PATIENCE
    while job.alive and len(metrics(folder)) < point.iteration and time.monotonic() < deadline:
        time.sleep(0.001)
        job.poll()
    time.sleep(point.delay * seconds)


def _unloadable(run: Path, named: int | None) -> list[str]:
    """Why what the run's file names cannot be loaded."""
    if named is None:
        return []
    try:
        found = candidates(run)
        reader = CheckpointReader(found.folders[0])
        for key in reader.shapes:
            reader.tensor(key)
    except (CheckpointError, IndexError) as error:
        return [f"iteration {named} is named, but {error}"]
    return [] if reader.manifest.iteration == named else [f"iteration {named} is named, but is not the first"]


def write_corpora(folder: Path) -> None:
    """Two small corpora of sentences, `a` and `b`, of different lengths, and the vocabulary of a BERT."""
    words = [f"{'##' if i % 3 == 2 else ''}w{i}" for i in range(len(SPECIAL), 64)]
    (folder / "vocab.txt").write_text("\n".join([*SPECIAL, *words]) + "\n")
    chance = np.random.default_rng(0)
    for name, documents in (("a", 40), ("b", 15)):
        with IndexedDatasetWriter(folder / name, "uint16") as writer:
            for length in chance.integers(5, 60, documents):
                text = chance.integers(len(SPECIAL), 64, length).astype(np.uint16)
                writer.add_document(np.array_split(text, 1 + length // 8))


def sweep(points: Sequence[Point], references: Mapping[Variant, Reference], folder: Path) -> Path:
    """Run one worker's points, one after another; returns the file of their results."""
    path = folder / f"results{points[0].number}.jsonl"
    with path.open("w") as out:
        for point in points:
            place = folder / f"point{point.number}"
            result = attempt(point, references[point.variant], folder / "data", place)
            print(json.dumps(result), file=out, flush=True)
            verdict = "; ".join(result["problems"]) or "ok"
            print(f"point {point.number}: {point.variant.layout}, {point.kind}: {verdict}", flush=True)
            if not result["problems"]:
                shutil.rmtree(place)
    return path


def sweep_side_by_side(
    points: Sequence[Point], references: Mapping[Variant, Reference], folder: Path, jobs: int
) -> list[dict[str, object]]:
    """Run all points, `jobs` of them at a time, in processes of their own; returns their results.

    Raises:
        RuntimeError: a worker failed.
    """
    workers = {}
    shares = [points[i::jobs] for i in range(jobs) if points[i::jobs]]
    for share in shares:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                sweep(share, references, folder)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        workers[child] = folder / f"results{share[0].number}.jsonl"
    for child in workers:
        if os.waitpid(child, 0)[1]:
            raise RuntimeError("a worker failed; see above")
    results = [json.loads(line) for path in workers.values() for line in path.read_text().splitlines()]
    return sorted(results, key=lambda result: result["number"])


def table(results: Sequence[Mapping[str, object]]) -> str:
    """The number of points, of those that hold, and the most work that was lost, by layout and kind."""
    rows = [f"{'layout':8}{'killed':24}{'points':>8}{'equal':>8}{'most lost':>11}"]
    by_kind: dict[tuple[str, str], list] = {}
    for result in results:
        by_kind.setdefault((result["variant"]["layout"], result["kind"]), []).append(result)
    for (layout, kind), group in [*sorted(by_kind.items()), (("all", ""), list(results))]:
        equal = sum(not result["problems"] for result in group)
        lost = max(result["lost"] for result in group)
        rows.append(f"{layout:8}{kind:24}{len(group):8}{equal:8}{lost:11}")
    return "\n".join(rows)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--points", type=int, default=200)
    parser.add_argument("--layout", choices=[*LAYOUTS, "all"], default="all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="points at a time")
    parser.add_argument("--output", type=Path, help="append the results here, a JSON object per point")
    parser.add_argument("--folder", type=Path, help="work here and leave what failed; must be empty or new")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.folder or Path(scratch)
        (folder / "data").mkdir(parents=True)
        write_corpora(folder / "data")
        layouts = list(LAYOUTS) if args.layout == "all" else [args.layout]
        references = {
            variant: refer(variant, folder / "data", folder / f"reference{i}")
            for i, variant in enumerate(variants(layouts, args.points))
        }
        points = list(choose(references, args.points, args.seed))
        there = sorted(path.name for path in (folder / "data").iterdir())
        results = sweep_side_by_side(points, references, folder, args.jobs)
        left = {path.name for path in (folder / "data").iterdir()}.difference(there)
    print(table(results))
    if left:
        print(f"left where state was offloaded to: {', '.join(sorted(left))}")
    if args.output is not None:
        with args.output.open("a") as out:
            out.writelines(json.dumps({"benchmark": "kill_sweep", **result}) + "\n" for result in results)
    return 1 if left or any(result["problems"] for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
