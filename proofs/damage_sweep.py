"""Damage sweep: nothing that happens to the files of a checkpoint goes unnoticed.

    python proofs/damage_sweep.py --jsonl damage.jsonl

Runs on T2 x D2 and P2 x D2 (threads as ranks) save two checkpoints of 30 MB each. The newest is damaged in
one way after another, and repaired each time: bits flipped, blocks of 4 KiB zeroed, files cut, lengthened,
missing, replaced by another, swapped, or taken from the older checkpoint, as the whole folder may be too; so
is the file that names it. Half of the flips and zeroes are uniform over all bytes, the other half over files
first, so that small ones get their share. Each time everything is read, which counts as

    detected   by DamagedCheckpointError and nothing else,
    named      if the message names a file that was damaged.

Of every kind, `--resumes` cases also go through `--load` on all ranks, which must load the older checkpoint,
equal in every bit, with a remark that names the file (`resumed`, `right`). If the name of the newest is
damaged, whole checkpoints must be found, with a remark; it must never start anew. At the end flipped bits are
tried on torch.load, safetensors and torch.distributed.checkpoint. Exits 1 unless everything was detected,
named and right.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import combinations, islice, permutations
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from xxhash import xxh3_64_hexdigest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megazero.checkpoint.box import Box
from megazero.checkpoint.folder import LATEST, candidates, iteration_folder
from megazero.checkpoint.part import Key, Part
from megazero.checkpoint.reader import CheckpointReader
from megazero.checkpoint.shards import parts_to_read
from megazero.checkpoint.tensor_file import memory_of
from megazero.config.training_plan import training_plan_of
from megazero.config.tree.checkpoint import CheckpointConfig
from megazero.config.tree.config import Config
from megazero.errors import DamagedCheckpointError
from megazero.mpu.context import ParallelContext, thread_context
from megazero.mpu.thread_group import ThreadWorld
from megazero.train.resume.resume import resume
from megazero.train.resume.snapshot import Snapshots
from megazero.train.step.engine import Engine
from megazero.train.step.state import TrainState
from megazero.train.step.timers import Timers
from megazero.verify.record import micro_batches, verification_engine
from tests.layouts.layout import VOCABULARY, Layout

LAYOUTS = (Layout(tp=2, dp=2, zero=1), Layout(pp=2, dp=2, zero=1))
OLDER, NEWEST = 1, 3  # the bits of 3 hold those of 1, so a flip can turn one name into the other
PAGE, BLOCK = 4 << 10, 4 << 20
COLUMNS = ("cases", "detected", "named", "resumed", "right")
OUTCOMES = ("silently wrong", "refused", "unharmed")


@dataclass(frozen=True)
class Damage:
    """One way to damage a run's folder.

    Attributes:
        kind: the kind of damage.
        changes: path from the run's folder -> its new content; None removes the file.
        names: any of these must be in the message.
    """

    kind: str
    changes: Mapping[str, bytes | None]
    names: tuple[str, ...]


@dataclass(frozen=True)
class Run:
    """A run's folder with two checkpoints.

    Attributes:
        directory, config, layout: the run's folder, configuration and layout.
        digests: by iteration, the digests of all that each rank holds.
        files: path from `directory` -> content.
        memory: memory for all tensors of the newest checkpoint.
    """

    directory: Path
    config: Config
    layout: Layout
    digests: Mapping[int, list[str]]
    files: Mapping[str, bytes]
    memory: Mapping[Key, Tensor]

    @property
    def newest(self) -> dict[str, bytes]:
        """The files of the newest checkpoint, by name."""
        folder = iteration_folder("", NEWEST).name + "/"
        return {k.removeprefix(folder): v for k, v in self.files.items() if k.startswith(folder)}

    def damaged(self, kind: str, changes: Mapping[str, bytes | None]) -> Damage:
        """Damage to files of the newest checkpoint."""
        folder = iteration_folder("", NEWEST).name
        return Damage(kind, {f"{folder}/{k}": v for k, v in changes.items()}, tuple(changes))

    @contextmanager
    def with_damage(self, damage: Damage) -> Iterator[None]:
        """The folder is damaged inside the block, and repaired after it."""
        self._put(damage.changes)
        try:
            yield
        finally:
            self._put({name: self.files.get(name) for name in damage.changes})

    def _put(self, contents: Mapping[str, bytes | None]) -> None:
        for name, content in contents.items():
            if content is None:
                (self.directory / name).unlink()
            else:
                (self.directory / name).write_bytes(content)


def make_run(layout: Layout, directory: Path, hidden_size: int) -> Run:
    """Train and save twice."""
    plain = layout.config()
    shape = {"hidden_size": hidden_size, "ffn_hidden_size": 4 * hidden_size}
    folders = CheckpointConfig(save=str(directory), load=str(directory))
    config = plain.model_copy(
        update={"model": plain.model.model_copy(update=shape), "checkpoint": folders},
    )
    world = ThreadWorld(layout.world_size)

    def work(rank: int) -> dict[int, str]:
        context = thread_context(world, layout.grid, rank)
        training_plan = training_plan_of(config, context.data.size)
        engine, state = verification_engine(config, training_plan, context), TrainState()
        snapshots = Snapshots(config, training_plan, engine, context, VOCABULARY, config.training.seed)
        found = {}
        for _ in range(NEWEST):
            step = training_plan.at(state.progress)
            result = engine.train_step(micro_batches(config, context, step), state.progress, Timers())
            state = state.after(step, result.skipped)
            if state.iteration in (OLDER, NEWEST):
                snapshots.save(state)
                found[state.iteration] = digest(engine, context)
        snapshots.saver.close()
        return found

    ranks = world.run(work)
    digests = {iteration: [each[iteration] for each in ranks] for iteration in (OLDER, NEWEST)}
    paths = [p for p in sorted(directory.rglob("*")) if p.is_file() and p.name != ".lock"]
    files = {str(path.relative_to(directory)): path.read_bytes() for path in paths}
    reader = CheckpointReader(iteration_folder(directory, NEWEST))
    memory = {key: reader.tensor(key) for key in reader.shapes}
    return Run(directory, config, layout, digests, files, memory)


def digest(engine: Engine, context: ParallelContext) -> str:
    """The digest of all weights and moments that a rank holds."""
    parts = parts_to_read(engine.optimizer, context)
    return xxh3_64_hexdigest(b"".join(bytes(memory_of(part.tensor.contiguous())) for part in parts))


def flips(files: Mapping[str, bytes], rng: random.Random) -> Iterator[dict[str, bytes]]:
    """Files with one bit flipped, without end."""
    for name, at in positions(files, rng):
        yield {name: flipped(files[name], 8 * at + rng.randrange(8))}


def flipped(data: bytes, bit: int) -> bytes:
    """`data` with one bit flipped."""
    return data[: bit // 8] + bytes([data[bit // 8] ^ 1 << bit % 8]) + data[bit // 8 + 1 :]


def zeroes(files: Mapping[str, bytes], rng: random.Random) -> Iterator[dict[str, bytes]]:
    """Files with one block of 4 KiB zeroed, without end."""
    for name, at in positions(files, rng):
        start = at // PAGE * PAGE
        lost = files[name][start : start + PAGE]
        if any(lost):
            yield {name: files[name][:start] + bytes(len(lost)) + files[name][start + PAGE :]}


def positions(files: Mapping[str, bytes], rng: random.Random) -> Iterator[tuple[str, int]]:
    """Positions of bytes in files: half uniform over all bytes, half over the files first."""
    names = list(files)
    sizes = [len(files[name]) for name in names]
    while True:
        (name,) = rng.choices(names, sizes)
        yield name, rng.randrange(len(files[name]))
        name = rng.choice(names)
        yield name, rng.randrange(len(files[name]))


def cuts(files: Mapping[str, bytes]) -> Iterator[dict[str, bytes]]:
    """Each file cut where it may matter, and lengthened."""
    for name, data in files.items():
        size = len(data)
        header = 8 + int.from_bytes(data[:8], "little") if name.endswith(".safetensors") else size // 2
        points = {0, 1, 7, 8, 9, header - 1, header, header + 1, PAGE, BLOCK}
        points |= {size // 2, size - PAGE, size - 1}
        for point in sorted(p for p in points if 0 <= p < size):
            yield {name: data[:point]}
        yield {name: data + b"\0"}
        yield {name: data + data[-PAGE:]}


def pairs(files: Mapping[str, bytes]) -> list[list[str]]:
    """Shards that could be mistaken for each other."""
    shards = [name for name in files if name.endswith(".safetensors")]
    return [[n for n in shards if n.startswith(sort)] for sort in ("model", "optimizer")]


def damages(run: Run, count: int, rng: random.Random) -> Iterator[Damage]:
    """All damage that is done to a run; `count` flips, and a tenth as many zeroed blocks."""
    files = run.newest
    older = {name: run.files.get(f"{iteration_folder('', OLDER).name}/{name}") for name in files}
    kinds: Mapping[str, Iterator[Mapping[str, bytes | None]]] = {
        "bit flipped": islice(flips(files, rng), count),
        "4 KiB zeroed": islice(zeroes(files, rng), count // 10),
        "cut or lengthened": cuts(files),
        "missing": ({name: None} for name in files),
        "duplicated": ({a: files[b]} for same in pairs(files) for a, b in permutations(same, 2)),
        "swapped": ({a: files[b], b: files[a]} for same in pairs(files) for a, b in combinations(same, 2)),
        "of another step": ({name: data} for name, data in older.items() if data not in (None, files[name])),
    }
    for kind, changes in kinds.items():
        for each in changes:
            yield run.damaged(kind, each)
    whole = run.damaged("folder of another step", older)
    yield Damage(whole.kind, whole.changes, (iteration_folder("", NEWEST).name,))
    data = run.files[LATEST]
    contents = [flipped(data, bit) for bit in range(8 * len(data))]
    contents += [b"", b"\0" * len(data), data * 2, b"7\n", b"-3\n", b"x" * PAGE]
    for content in contents:
        yield Damage("name of the newest", {LATEST: content}, (LATEST,))


@dataclass(frozen=True)
class Outcome:
    """The result of a damage; `trouble` says in words what should not have happened."""

    detected: bool = False
    named: bool = False
    trouble: str = ""


def read_everything(run: Run, damage: Damage) -> Outcome:
    """Read all of the newest checkpoint."""
    try:
        reader = CheckpointReader(iteration_folder(run.directory, NEWEST))
        reader.read(Part(k, tuple(t.shape), Box.whole(t.shape), t) for k, t in run.memory.items())
    except DamagedCheckpointError as error:
        named = any(name in str(error) for name in damage.names)
        return Outcome(True, named, "" if named else f"does not name the file: {error}")
    except Exception as error:
        return Outcome(trouble=f"{type(error).__name__} instead of DamagedCheckpointError: {error}")
    return Outcome(trouble="was read without an error")


def look(run: Run) -> Outcome:
    """Find the checkpoints when the file that names the newest is damaged."""
    try:
        found = candidates(run.directory)
    except Exception as error:
        return Outcome(trouble=f"{type(error).__name__} instead of a remark: {error}")
    if len(found.folders) < len(run.digests):
        return Outcome(trouble=f"found only {found.folders}")
    named = any(LATEST in remark for remark in found.remarks)
    return Outcome(bool(found.remarks), named, "" if named else f"no remark names it: {found.remarks}")


def continue_run(run: Run, names: tuple[str, ...], allowed: tuple[int, ...]) -> str:
    """Resume on all ranks. Returns what went wrong, in words.

    Args:
        run: the damaged run.
        names: any of these must be in the remarks.
        allowed: iterations that may be continued from.
    """
    world = ThreadWorld(run.layout.world_size)

    def work(rank: int) -> tuple[int, str, str]:
        context = thread_context(world, run.layout.grid, rank)
        build = partial(verification_engine, context=context)
        resumed = resume(run.config, context, VOCABULARY, build)
        return resumed.state.iteration, digest(resumed.engine, context), "; ".join(resumed.remarks)

    try:
        ranks = world.run(work)
    except Exception as error:
        return f"{type(error).__name__} at the resume: {error}"
    iterations = {iteration for iteration, _, _ in ranks}
    if len(iterations) > 1 or not iterations <= set(allowed):
        return f"resumed from {sorted(iterations)} instead of one of {allowed}"
    if [each for _, each, _ in ranks] != run.digests[iterations.pop()]:
        return "resumed with other bits than were saved"
    if not any(name in ranks[0][2] for name in names):
        return f"no remark names the file: {ranks[0][2]}"
    return ""


def sweep(
    run: Run, count: int, resumes: int, rng: random.Random, say: Callable[[str], None]
) -> dict[str, Counter[str]]:
    """Do all the damage to a run; returns how often each thing happened, by kind."""
    found: dict[str, Counter[str]] = defaultdict(Counter)

    def note(damage: Damage, trouble: str, **happened: bool) -> None:
        found[damage.kind].update({"cases": 1, **happened})
        if trouble:
            say(f"{run.layout.name}: {damage.kind}: {', '.join(damage.names)}: {trouble}")

    for damage in damages(run, count, rng):
        seen, of_name = found[damage.kind], LATEST in damage.changes
        # Powers of two: the first cases, and some later ones.
        also_resume = seen["resumed"] < resumes and seen["cases"] & (seen["cases"] - 1) == 0
        allowed = (OLDER, NEWEST) if of_name else (OLDER,)
        with run.with_damage(damage):
            outcome = look(run) if of_name else read_everything(run, damage)
            wrong = continue_run(run, damage.names, allowed) if also_resume else ""
        note(
            damage,
            outcome.trouble or wrong,
            detected=outcome.detected,
            named=outcome.named,
            resumed=also_resume,
            right=also_resume and not wrong,
        )
    if wrong := continue_run(run, ("loaded",), (NEWEST,)):
        raise AssertionError(f"the repaired run is not whole: {wrong}")
    return found


def complete(found: Counter[str]) -> bool:
    """Whether nothing was missed."""
    return found["cases"] == found["detected"] == found["named"] and found["resumed"] == found["right"]


@dataclass(frozen=True)
class Peer:
    """Another way to keep tensors: how to save them in a folder, and to load them from it."""

    name: str
    save: Callable[[dict[str, Tensor], Path], None]
    load: Callable[[dict[str, Tensor], Path], dict[str, Tensor]]


def save_dcp(tensors: dict[str, Tensor], folder: Path) -> None:
    """Save by torch's own writer."""
    import torch.distributed.checkpoint as dcp  # takes seconds

    dcp.save(tensors, checkpoint_id=folder, no_dist=True)


def load_dcp(like: dict[str, Tensor], folder: Path) -> dict[str, Tensor]:
    """Load into new tensors of the same shapes."""
    import torch.distributed.checkpoint as dcp

    state = {name: torch.zeros_like(tensor) for name, tensor in like.items()}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    return state


PEERS = (
    Peer(
        "torch.load",
        lambda tensors, folder: torch.save(tensors, folder / "all.pt"),
        lambda like, folder: torch.load(folder / "all.pt", weights_only=True),
    ),
    Peer(
        "safetensors",
        lambda tensors, folder: save_file(tensors, folder / "all.safetensors"),
        lambda like, folder: load_file(folder / "all.safetensors"),
    ),
    Peer("torch.distributed.checkpoint", save_dcp, load_dcp),
)


def compare(peer: Peer, count: int, folder: Path, rng: random.Random) -> Counter[str]:
    """What single flipped bits, uniform over all bytes, do to tensors that were saved in another way."""
    folder.mkdir()
    made = torch.Generator().manual_seed(0)
    tensors = {f"layers.{i}.weight": torch.randn(256, 256, generator=made) for i in range(8)}
    peer.save(tensors, folder)
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    found: Counter[str] = Counter()
    for _ in range(count):
        (path,) = rng.choices(paths, [p.stat().st_size for p in paths])
        data = path.read_bytes()
        path.write_bytes(flipped(data, rng.randrange(8 * len(data))))
        try:
            loaded = peer.load(tensors, folder)
        except Exception:
            found["refused"] += 1
        else:
            equal = loaded.keys() == tensors.keys() and all(
                torch.equal(loaded[k], tensors[k]) for k in tensors
            )
            found["unharmed" if equal else "silently wrong"] += 1
        path.write_bytes(data)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--flips", type=int, default=1000, help="single flipped bits, over all layouts")
    parser.add_argument(
        "--resumes", type=int, default=6, help="cases of each kind and layout that also resume"
    )
    parser.add_argument(
        "--peer-flips", type=int, default=200, help="flips for each other format; 0 skips them"
    )
    parser.add_argument("--hidden-size", type=int, default=320, help="hidden size of the model that is saved")
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--jsonl", type=Path, help="file that gets one JSON line per kind and per peer")
    args = parser.parse_args()
    torch.set_num_threads(1)
    # This warning comes with every call, and there are hundreds.
    warnings.filterwarnings("ignore", "torch.distributed is disabled")
    began, lines, missed = time.perf_counter(), [], 0
    print(f"{'layout':20} {'damage':23}" + "".join(f"{column:>9}" for column in COLUMNS))
    with tempfile.TemporaryDirectory() as folder:
        for layout in LAYOUTS:
            run = make_run(layout, Path(folder) / layout.name, args.hidden_size)
            rng = random.Random(args.seed)
            for kind, found in sweep(run, args.flips // len(LAYOUTS), args.resumes, rng, print).items():
                print(f"{layout.name:20} {kind:23}" + "".join(f"{found[column]:9}" for column in COLUMNS))
                lines.append({"layout": layout.name, "damage": kind, **found})
                missed += not complete(found)
        for peer in PEERS if args.peer_flips else ():
            met = compare(peer, args.peer_flips, Path(folder) / peer.name, random.Random(args.seed))
            print(
                f"{peer.name:29} of {args.peer_flips} flips: " + ", ".join(f"{met[o]} {o}" for o in OUTCOMES)
            )
            lines.append({"peer": peer.name, "cases": args.peer_flips, **met})
    print(f"{'FAILED' if missed else 'whole'} ({time.perf_counter() - began:.0f} s)")
    if args.jsonl:
        args.jsonl.write_text(
            "".join(json.dumps({"benchmark": "damage_sweep", **line}) + "\n" for line in lines)
        )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
