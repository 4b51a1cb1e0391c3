"""What is broken where, and what must come of it."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.fault_matrix.faults import (
    AfterUpdate,
    BadGradient,
    FlippedBit,
    FullDisk,
    Poisoned,
    Slow,
    Spoil,
)
from benchmarks.fault_matrix.runs import Outcome, Setting, run_processes, train, write_text
from megazero.checkpoint import CheckpointReader, Verify, iteration_folder
from megazero.errors import MegazeroError

BASE = "--global-batch-size 12 --train-iters 36 --save-interval 10 --spike-window 20 "
STEP = 31  # in which most faults strike, when checkpoints 10, 20 and 30 are there
NOISE = range(12 * (STEP - 1), 12 * STEP)
NAN = float("nan")
SHARDED = "--zero-param-persistence-threshold 0"  # stage 3 shards small parameters too


@dataclass(frozen=True)
class Expected:
    """What must come of a fault.

    Attributes:
        status: the exit status.
        told: patterns, each of which an error, an incident or a line of output must match.
        kept: iterations whose checkpoints must be there and whole.
        kinds: the kinds of the incidents, in order; None does not say.
        actions: what the run did about them, in order; None does not say.
    """

    status: int
    told: tuple[str, ...]
    kept: tuple[int, ...] = ()
    kinds: tuple[str, ...] | None = None
    actions: tuple[str, ...] | None = None


@dataclass(frozen=True)
class FaultCase:
    """One fault.

    Attributes:
        kind: of fault, such as ``copies``.
        name: what and where.
        run: trains with it in a folder.
        expected: what must come of it.
        quick: whether it is one of those that the default suite runs.
    """

    kind: str
    name: str
    run: Callable[[Path], Outcome]
    expected: Expected
    quick: bool = False

    def complaints(self, folder: Path) -> list[str]:
        """Run it; what came out otherwise than expected, in words."""
        outcome, expected, found = self.run(folder), self.expected, []
        if outcome.status != expected.status:
            found.append(f"exit status {outcome.status} instead of {expected.status}: {_first(outcome)}")
        if expected.status and any(error is None for error in outcome.errors):
            found.append("some ranks did not end with the others")
        heard = "\n".join(
            [*map(str, outcome.errors), *(each["summary"] for each in outcome.incidents), outcome.printed]
        )
        found += [f"nothing says {pattern!r}" for pattern in expected.told if not re.search(pattern, heard)]
        for what, field in (("kind", expected.kinds), ("action", expected.actions)):
            told = tuple(each[what] for each in outcome.incidents)
            if field is not None and told != field:
                found.append(f"incidents of {what} {told} instead of {field}")
        return found + _lost(folder, expected.kept)


def _first(outcome: Outcome) -> str:
    return next((str(error)[:200] for error in outcome.errors if error is not None), "no error")


def _lost(folder: Path, kept: Sequence[int]) -> list[str]:
    """Checkpoints that are not there, or not whole."""
    found = []
    for iteration in kept:
        try:
            reader = CheckpointReader(iteration_folder(folder, iteration), verify=Verify.FULL)
            if reader.facts["healthy"] is not True:
                found.append(f"the checkpoint of iteration {iteration} says that the run was not healthy")
        except (MegazeroError, OSError) as error:
            found.append(f"the checkpoint of iteration {iteration} is lost: {error}")
    return found


def settings_that_differ() -> list[FaultCase]:
    """One rank was started with another setting, or other data."""
    changes = {
        "lr": "--lr 2e-2",
        "seed": "--seed 8",
        "adam_beta2": "--adam-beta2 0.9",
        "clip_grad": "--clip-grad 2",
        "hidden_dropout": "--hidden-dropout 0.1",
        "weight_decay": "--weight-decay 0.5",
        "train_iters": "--train-iters 35",
    }
    layouts = [Setting.of(dp=2), Setting.of(tp=2), Setting.of(pp=2), Setting.of(dp=2, stage=3)]
    found = []
    for number, (name, flags) in enumerate(changes.items()):
        where = layouts[number % len(layouts)]
        found.append(
            FaultCase(
                "settings",
                f"another {name} on rank 1, {where.name}",
                lambda folder, where=where, flags=flags: train(where, folder, BASE, flags_of={1: flags}),
                Expected(2, (rf"`{name}` must be the same on all ranks, but is .* on rank 1",), kinds=()),
                quick=number < 2,
            )
        )

    def other_data(folder: Path) -> Outcome:
        other = write_text(folder.parent / "other", 44_000)
        return train(Setting.of(dp=3), folder, BASE, flags_of={2: f"--data-path {other}"})

    told = (r"`training data` must be the same on all ranks, but is .* on ranks 0-1, .* on rank 2",)
    found.append(FaultCase("settings", "other data on rank 2, D3", other_data, Expected(2, told), quick=True))
    return found


def copies_that_differ() -> list[FaultCase]:
    """A bit flips in one of several copies."""
    flip, found = FlippedBit, []
    check = "--check-weights-interval 1 "
    rows = [
        (Setting.of(dp=3), flip("up.weight", "weight"), r"up\.weight` \(master weights\) on rank 2 differs"),
        (Setting.of(dp=3), flip("qkv.bias", "exp_avg"), r"qkv\.bias` \(exp_avg\) on rank 2 differs"),
        (
            Setting.of(dp=3, dtype="bf16"),
            flip("up.weight", "in use"),
            r"\(weights in use\) on rank 2 differs",
        ),
        (
            Setting.of(dp=3, dtype="fp16"),
            flip("up.weight", "weight"),
            r"\(master weights\) on rank 2 differs",
        ),
        (Setting.of(dp=3, stage=1), flip("final_norm.bias", "in use"), r"on rank 2 differs from ranks 0-1"),
        (
            Setting.of(dp=3, stage=2, dtype="bf16"),
            flip("down", "in use"),
            r"on rank 2 differs from ranks 0-1",
        ),
        (Setting.of(dp=2), flip("up.weight", "exp_avg_sq"), r"is not the same on ranks 0-1"),
        (
            Setting.of(dp=2, stage=3, dtype="bf16"),
            flip("word.weight", "in use"),
            r"`embedding\.word\.weight` \(weights in use\) on rank 1 is not what its masters round to",
        ),
        (Setting.of(tp=2), flip("input_norm.weight", "weight"), r"is not the same on ranks 0-1"),
        (Setting.of(tp=2, dtype="bf16"), flip("down.bias", "exp_avg"), r"down\.bias` \(exp_avg\)"),
        (
            Setting.of(tp=2, dp=2, stage=3),
            flip("input_norm.weight", "exp_avg"),
            r"\(exp_avg\) is not the same",
        ),
        (Setting.of(pp=2), flip("", "exp_avg_sq"), r"embedding\.word\.weight` \(exp_avg_sq\)"),
    ]
    for number, (where, fault, told) in enumerate(rows):
        rank = where.grid.world_size - 1
        if where.grid.pp == 2:
            fault = FlippedBit("weight", fault.kind)
        found.append(
            FaultCase(
                "copies",
                f"a bit of {fault.name} ({fault.kind}) flips on rank {rank}, {where.name}",
                lambda folder, where=where, fault=fault, rank=rank: train(
                    where, folder, f"{BASE} {check} {SHARDED}", spoils={rank: AfterUpdate(STEP, fault)}
                ),
                Expected(
                    1, (told, f"after iteration {STEP}"), (10, 20, 30), ("weights differ",), ("stopped",)
                ),
                quick=number in (0, 7, 8),
            )
        )
    whole = (10, 20, 30)
    for choice, where, action in (
        ("majority", Setting.of(dp=3), "repaired"),
        ("majority", Setting.of(dp=3, stage=1, dtype="bf16"), "repaired"),
        ("checkpoint", Setting.of(dp=2), "rolled back"),
        ("checkpoint", Setting.of(tp=2, stage=0, dtype="bf16"), "rolled back"),
    ):
        kind = "in use" if where.grid.tp == 1 else "weight"
        name = "up.weight" if where.grid.tp == 1 else "input_norm.weight"
        rank = where.grid.world_size - 1
        flags = BASE + check + f"--on-weights-differ {choice}"
        spoil = AfterUpdate(STEP, FlippedBit(name, kind))
        found.append(
            FaultCase(
                "copies",
                f"a bit of {name} flips on rank {rank} and is {action}, {where.name}",
                lambda folder, where=where, flags=flags, rank=rank, spoil=spoil: train(
                    where, folder, flags, spoils={rank: spoil}
                ),
                Expected(0, (name,), whole, ("weights differ",), (action,)),
                quick=where.grid.dp == 3 and where.name.endswith("fp32"),
            )
        )
    return found


def gradients_that_are_wrong() -> list[FaultCase]:
    """A rank computes a wrong gradient, once or for good."""
    found = []
    rerun = BASE + "--rerun-on-fault "
    kept = (10, 20, 30)

    def case(
        name: str,
        where: Setting,
        flags: str,
        spoil: Spoil,
        expected: Expected,
        rank: int = 1,
        quick: bool = False,
    ) -> None:
        found.append(
            FaultCase(
                "gradients",
                f"{name} on rank {rank}, {where.name}",
                lambda folder: train(where, folder, flags, spoils={rank: spoil}),
                expected,
                quick,
            )
        )

    once = [
        (Setting.of(dp=2), 3, 2.0**20),
        (Setting.of(dp=3), 2, NAN),
        (Setting.of(dp=2, stage=1, dtype="bf16"), 3, NAN),
        (Setting.of(dp=2, stage=2), 3, 2.0**20),
        (Setting.of(dp=2, stage=3), 3, NAN),
        (Setting.of(tp=2), 6, 2.0**20),
        (Setting.of(pp=2), 6, NAN),
        (Setting.of(tp=2, dp=2), 3, NAN),
    ]
    for number, (where, backwards, factor) in enumerate(once):
        name = "final_norm.weight" if where.grid.pp == 2 else "layers.0.mlp.up.weight"
        told = (r"rank 1 computed something else the second time",)
        if where.grid.tp == 2 or where.grid.pp == 2:
            told = (r"ranks? .*1.* computed something else the second time",)
        case(
            f"a gradient wrong once ({factor:g})",
            where,
            rerun,
            BadGradient(name, backwards * (STEP - 1) + 1, 1, factor),
            Expected(0, told, kept, ("fault",), ("went on",)),
            quick=number < 2,
        )
    for number, (where, backwards, factor) in enumerate(
        [
            (Setting.of(dp=3), 2, 2.0**20),
            (Setting.of(dp=4), 0, NAN),
            (Setting.of(dp=3, stage=2, dtype="bf16"), 2, 2.0**20),
            (Setting.of(dp=3, stage=3), 2, NAN),
        ]
    ):
        flags = rerun
        if where.grid.dp == 4:
            flags, backwards = rerun.replace("--global-batch-size 12", "--global-batch-size 8"), 1
        case(
            f"a gradient wrong for good ({factor:g})",
            where,
            flags,
            BadGradient("layers.0.mlp.up.weight", backwards * (STEP - 1) + 1, None, factor),
            Expected(
                1, (r"rank 1 computes something else than other ranks",), kept, ("fault",), ("stopped",)
            ),
            quick=number == 0,
        )
    for where, backwards, quick in (
        (Setting.of(dp=2), 3, True),
        (Setting.of(dp=2, dtype="bf16"), 3, False),
        (Setting.of(pp=2), 6, False),
    ):
        name = "final_norm.weight" if where.grid.pp == 2 else "layers.0.mlp.up.weight"
        case(
            "NaN in a gradient from now on, nothing repeated",
            where,
            BASE,
            BadGradient(name, backwards * (STEP - 1) + 1, None, NAN),
            Expected(
                1,
                (r"`max_skipped_updates` in a row, 5, were skipped up to iteration 35", name.split(".")[-2]),
                kept,
                ("not finite", "row of skipped updates"),
                ("skipped", "stopped"),
            ),
            quick=quick,
        )
    return found


def sums_that_are_wrong() -> list[FaultCase]:
    """What one rank brings to a sum over ranks is changed on the way."""
    found = []
    for where, operation, axis, each in (
        (Setting.of(dp=2), "all_reduce", "replica", 1),
        (Setting.of(dp=3), "all_reduce", "replica", 1),
        (Setting.of(dp=2, stage=1), "reduce_scatter", "replica", 1),
        (Setting.of(dp=2, stage=2), "reduce_scatter", "replica", 3),
    ):
        group = (1, axis, operation, each * (STEP - 1) + 1, lambda tensor: tensor.mul_(1e4), 2000)
        found.append(
            FaultCase(
                "sums",
                f"what rank 1 brings to {operation} is changed once, {where.name}",
                lambda folder, where=where, group=group: train(
                    where, folder, BASE + "--rerun-on-fault", group=group
                ),
                Expected(
                    0,
                    (r"the sums over the ranks came out differently: the network or a buffer failed once",),
                    (10, 20, 30),
                    ("fault",),
                    ("went on",),
                ),
                quick=where.grid.dp == 3,
            )
        )
    return found


def states_that_are_not_finite() -> list[FaultCase]:
    """A weight or a moment becomes NaN or inf; nothing of that may be saved."""
    found = []
    for number, (where, kind, value) in enumerate(
        [
            (Setting.of(dp=2, stage=1), "exp_avg", NAN),
            (Setting.of(dp=2, stage=3), "exp_avg_sq", float("inf")),
            (Setting.of(tp=2), "exp_avg", float("inf")),
            (Setting.of(pp=2), "exp_avg", NAN),
            (Setting.of(dp=2, stage=2, dtype="bf16"), "exp_avg", NAN),
        ]
    ):
        name = "final_norm.weight" if where.grid.pp == 2 or where.grid.dp == 2 else "up.weight"
        flags = BASE.replace("--train-iters 36", "--train-iters 30") + "--check-weights-interval 0"
        spoil = AfterUpdate(30, Poisoned(name, kind, value))
        found.append(
            FaultCase(
                "finite",
                f"{kind} of {name} becomes {value} before a save, {where.name}",
                lambda folder, where=where, flags=flags, spoil=spoil: train(
                    where, folder, flags, spoils={1: spoil}
                ),
                Expected(1, (rf"must be finite to be saved, but rank 1 .* {kind}|{kind}.*rank 1",), (10, 20)),
                quick=number == 0,
            )
        )
    for where in (Setting.of(dp=2), Setting.of(tp=2, dtype="bf16")):
        spoil = AfterUpdate(STEP, Poisoned("down.weight", "weight"))
        found.append(
            FaultCase(
                "finite",
                f"a weight becomes NaN on rank 1, {where.name}",
                lambda folder, where=where, spoil=spoil: train(
                    where, folder, BASE + "--check-weights-interval 0 --train-iters 40", spoils={1: spoil}
                ),
                Expected(1, (r"a number is inf or NaN", r"`max_skipped_updates` in a row"), (10, 20, 30)),
            )
        )
    return found


def batches_that_are_noise() -> list[FaultCase]:
    """A batch of noise among the data."""
    found = []
    rows = [
        ("warn", Setting.of(dp=2), "none"),
        ("skip", Setting.of(dp=2), "skipped"),
        ("rollback", Setting.of(dp=2), "rolled back"),
        ("rollback", Setting.of(tp=2), "rolled back"),
        ("rollback", Setting.of(pp=2), "rolled back"),
        ("rollback", Setting.of(dp=2, stage=3, dtype="bf16"), "rolled back"),
        ("skip", Setting.of(tp=2, pp=2), "skipped"),
        ("skip", Setting.of(dp=2, stage=2, dtype="fp16"), "skipped"),
        ("warn", Setting.of(dp=3, stage=1, dtype="bf16"), "none"),
    ]
    for number, (choice, where, action) in enumerate(rows):
        found.append(
            FaultCase(
                "batches",
                f"a batch of noise with --on-spike {choice}, {where.name}",
                lambda folder, where=where, choice=choice: train(
                    where, folder, f"{BASE} --on-spike {choice}", noise=NOISE
                ),
                Expected(0, (r"loss \S+, where \S+ is usual",), (10, 20, 30), ("spike",), (action,)),
                quick=number in (1, 2),
            )
        )
    found.append(
        FaultCase(
            "batches",
            "noise without end with --on-spike rollback, D2",
            lambda folder: train(
                Setting.of(dp=2),
                folder,
                f"{BASE} --on-spike rollback --max-rollbacks 2",
                noise=range(NOISE.start, 12 * 36),
            ),
            Expected(
                1,
                (r"`max_rollbacks` to the checkpoint of iteration 30, 2, did not help",),
                (10, 20, 30),
                ("spike",) * 3,
                ("rolled back", "rolled back", "stopped"),
            ),
        )
    )
    return found


def disks_that_fail() -> list[FaultCase]:
    """A disk is full for a while."""
    found = []
    for where, rank, flags in (
        (Setting.of(dp=2), 0, ""),
        (Setting.of(dp=2, stage=1), 1, ""),
        (Setting.of(pp=2), 1, ""),
        (Setting.of(dp=2, stage=3), 1, "--async-save"),
    ):
        found.append(
            FaultCase(
                "disks",
                f"the disk of rank {rank} is full for one checkpoint, {where.name} {flags}".rstrip(),
                lambda folder, where=where, rank=rank, flags=flags: train(
                    where, folder, BASE + flags, disks={rank: FullDisk(2, 1)}
                ),
                Expected(0, (rf"rank {rank} could not .*No space left",), (30, 36), ()),
                quick=where.grid.pp == 2,
            )
        )
    return found


def _damage(path: Path, byte: int) -> None:
    """Flip a bit of a file."""
    content = bytearray(path.read_bytes())
    content[byte] ^= 0x10
    path.write_bytes(content)


def data_that_changes() -> list[FaultCase]:
    """Tokens that are not what they were: when the dataset was made, the run began, or it was saved."""

    def flipped(folder: Path) -> Outcome:
        _damage(Path(write_text(folder.parent / "text")).with_suffix(".bin"), 1)
        return train(Setting.of(dp=2), folder, BASE)

    def cut(folder: Path) -> Outcome:
        path = Path(write_text(folder.parent / "text")).with_suffix(".bin")
        spoil = AfterUpdate(STEP, lambda engine: os.truncate(path, 100))
        return train(Setting.of(dp=2), folder, BASE, spoils={1: spoil})

    def written(folder: Path) -> Outcome:
        path = Path(write_text(folder.parent / "text")).with_suffix(".bin")
        spoil = AfterUpdate(STEP, lambda engine: os.utime(path))
        return train(Setting.of(tp=2), folder, BASE, spoils={1: spoil})

    def resumed(folder: Path) -> Outcome:
        prefix = write_text(folder.parent / "text")
        first = train(Setting.of(dp=2), folder, BASE.replace("--train-iters 36", "--train-iters 30"))
        assert first.status == 0, _first(first)
        for suffix in (".bin", ".idx", ".sum"):
            Path(prefix).with_suffix(suffix).unlink()
        write_text(folder.parent / "text", 44_000)
        return train(Setting.of(dp=2), folder, f"{BASE} --load {folder}")

    kept = (10, 20, 30)
    return [
        FaultCase(
            "data", "a bit of a token flips, D2", flipped, Expected(1, (r"text.bin` must have CRC-32",)), True
        ),
        FaultCase(
            "data", "tokens are cut off under the run, D2", cut, Expected(1, (r"text\.bin",), kept), True
        ),
        FaultCase(
            "data",
            "tokens are written to under the run, T2",
            written,
            Expected(1, (r"rank \d sees: .*text\.bin was written to",), kept),
        ),
        FaultCase(
            "data",
            "tokens change before a resume, D2",
            resumed,
            Expected(1, (r"text\.bin.* must hold what the checkpoint was trained on",), kept),
            True,
        ),
    ]


def checkpoints_that_are_bad() -> list[FaultCase]:
    """The newest checkpoint is damaged, or its run was not healthy: the one before is resumed from."""

    def damaged(folder: Path, where: Setting) -> Outcome:
        first = train(where, folder, BASE.replace("--train-iters 36", "--train-iters 30"))
        assert first.status == 0, _first(first)
        path = next(iteration_folder(folder, 30).glob("*.safetensors"))
        _damage(path, path.stat().st_size - 5)
        return train(where, folder, f"{BASE} --load {folder}")

    def unhealthy(folder: Path, where: Setting) -> Outcome:
        noise = range(12 * 28, 12 * 29)  # a spike at step 29 is not over at the checkpoint of step 30
        first = train(where, folder, BASE.replace("--train-iters 36", "--train-iters 30"), noise=noise)
        assert first.saved == (10, 20, 30), first.saved
        return train(where, folder, f"{BASE} --load {folder}", noise=noise)

    return [
        FaultCase(
            "checkpoints",
            f"the newest is damaged, {where.name}",
            lambda folder, where=where: damaged(folder, where),
            Expected(0, (r"passed over .*iter_0000030", r"loaded .*iter_0000020"), (10, 20, 30)),
            where.grid.tp == 2,
        )
        for where in (Setting.of(tp=2), Setting.of(dp=2, stage=3))
    ] + [
        FaultCase(
            "checkpoints",
            "the newest is of a run in a spike, D2",
            lambda folder: unhealthy(folder, Setting.of(dp=2)),
            Expected(
                0,
                (
                    r"passed over .*iter_0000030: something was wrong with the run then",
                    r"loaded .*iter_0000020",
                ),
                (10, 20),
            ),
            True,
        )
    ]


def ranks_that_are_slow_or_gone() -> list[FaultCase]:
    """A rank takes longer than the others, stops, or dies."""
    slow = (r"slow rank: rank 1 takes \S+ times its peers' time",)
    flags = BASE + "--straggler-interval 5 --heartbeat-timeout-minutes 0.05"
    long = flags.replace("--train-iters 36", "--train-iters 100000")
    found = [
        FaultCase(
            "ranks",
            f"rank 1 is slow, {where.name}",
            lambda folder, where=where: train(where, folder, flags, spoils={1: Slow(0.1)}, watched=True),
            Expected(0, slow, (10, 20, 30), ("slow rank",), ("none",)),
            where.grid.dp == 2,
        )
        for where in (Setting.of(dp=2), Setting.of(dp=2, stage=2))
    ]
    for name, number, rank, told in (
        ("dies", signal.SIGKILL, 1, r"rank 1 .*(gone|reset|closed)"),
        ("is stopped", signal.SIGSTOP, 1, r"rank 1 .*no sign of life"),
        ("which keeps the store, is stopped", signal.SIGSTOP, 0, r"rank 0 .*which keeps the job's key-value"),
    ):
        found.append(
            FaultCase(
                "ranks",
                f"rank {rank}, of three processes, {name}",
                lambda folder, number=number, rank=rank: run_processes(folder, 3, long, [(number, rank)]),
                Expected(1, (told, r"the job has failed"), (10, 20)),
            )
        )
    return found


def all_cases() -> list[FaultCase]:
    """All of them, by kind."""
    return [
        *settings_that_differ(),
        *copies_that_differ(),
        *gradients_that_are_wrong(),
        *sums_that_are_wrong(),
        *states_that_are_not_finite(),
        *batches_that_are_noise(),
        *disks_that_fail(),
        *data_that_changes(),
        *checkpoints_that_are_bad(),
        *ranks_that_are_slow_or_gone(),
    ]
