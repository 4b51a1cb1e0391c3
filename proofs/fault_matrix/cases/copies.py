"""A bit flips in one of several copies."""

from __future__ import annotations

from proofs.fault_matrix.cases.case import (
    BASE,
    KEPT,
    SHARDED,
    STEP,
    Expected,
    FaultCase,
)
from proofs.fault_matrix.faults import (
    AfterUpdate,
    FlippedBit,
)
from proofs.fault_matrix.runs import Setting, train

CHECKED = BASE + "--check-weights-interval 1 "


def copies_that_differ() -> list[FaultCase]:
    """A bit flips in one of several copies."""
    return [*_found(), *_mended()]


def _found() -> list[FaultCase]:
    """The run stops, and names the tensor and the rank."""
    rows: list[tuple[Setting, str, str, str]] = [
        (Setting.of(dp=3), "up.weight", "weight", r"up\.weight` \(master weights\) on rank 2 differs"),
        (Setting.of(dp=3), "qkv.bias", "exp_avg", r"qkv\.bias` \(exp_avg\) on rank 2 differs"),
        (Setting.of(dp=3, dtype="bf16"), "up.weight", "in use", r"\(weights in use\) on rank 2 differs"),
        (Setting.of(dp=3, dtype="fp16"), "up.weight", "weight", r"\(master weights\) on rank 2 differs"),
        (Setting.of(dp=3, stage=1), "final_norm.bias", "in use", r"on rank 2 differs from ranks 0-1"),
        (Setting.of(dp=3, stage=2, dtype="bf16"), "down", "in use", r"on rank 2 differs from ranks 0-1"),
        (Setting.of(dp=2), "up.weight", "exp_avg_sq", r"is not the same on ranks 0-1"),
        (
            Setting.of(dp=2, stage=3, dtype="bf16"),
            "word.weight",
            "in use",
            r"`embedding\.word\.weight` \(weights in use\) on rank 1 is not what its masters round to",
        ),
        (Setting.of(tp=2), "input_norm.weight", "weight", r"is not the same on ranks 0-1"),
        (Setting.of(tp=2, dtype="bf16"), "down.bias", "exp_avg", r"down\.bias` \(exp_avg\)"),
        (Setting.of(tp=2, dp=2, stage=3), "input_norm.weight", "exp_avg", r"\(exp_avg\) is not the same"),
        (Setting.of(pp=2), "weight", "exp_avg_sq", r"embedding\.word\.weight` \(exp_avg_sq\)"),
    ]
    return [
        _flip(where, name, kind, "", _stopped(told), number in (0, 7, 8))
        for number, (where, name, kind, told) in enumerate(rows)
    ]


def _mended() -> list[FaultCase]:
    """The run takes the value of most, or goes back to a checkpoint, and goes on."""
    found = []
    for choice, where, action in (
        ("majority", Setting.of(dp=3), "repaired"),
        ("majority", Setting.of(dp=3, stage=1, dtype="bf16"), "repaired"),
        ("checkpoint", Setting.of(dp=2), "rolled back"),
        ("checkpoint", Setting.of(tp=2, stage=0, dtype="bf16"), "rolled back"),
    ):
        name, kind = ("up.weight", "in use") if where.grid.tp == 1 else ("input_norm.weight", "weight")
        expected = Expected(0, (name,), KEPT, ("weights differ",), (action,))
        quick = where.grid.dp == 3 and where.name.endswith("fp32")
        found.append(_flip(where, name, kind, f"--on-weights-differ {choice}", expected, quick))
    return found


def _flip(where: Setting, name: str, kind: str, flags: str, expected: Expected, quick: bool) -> FaultCase:
    """A bit of the last rank flips."""
    rank = where.grid.world_size - 1
    spoil = AfterUpdate(STEP, FlippedBit(name, kind))
    return FaultCase(
        "copies",
        f"a bit of {name} ({kind}) flips on rank {rank}, {where.name} {flags}".rstrip(),
        lambda folder: train(where, folder, f"{CHECKED} {SHARDED} {flags}", spoils={rank: spoil}),
        expected,
        quick,
    )


def _stopped(told: str) -> Expected:
    return Expected(1, (told, f"after iteration {STEP}"), KEPT, ("weights differ",), ("stopped",))
