"""Schedules for sweeps: every kind in every small size that it allows."""

from __future__ import annotations

from collections.abc import Iterator

from megazero.pipeline.actions import Action, Op, Program, Schedule
from megazero.pipeline.schedules import build_schedule

FAMILIES = (
    *(("gpipe", 1), ("1f1b", 1), ("zb-h1", 1), ("zb-v", 2)),
    *(("interleaved", chunks) for chunks in (1, 2, 3)),
    *(("forward", chunks) for chunks in (1, 2, 3)),
)


def schedules(kind: str, chunks: int, *, stages: int = 6, microbatches: int = 12) -> Iterator[Schedule]:
    """All of a family up to these sizes."""
    for p in range(1, stages + 1):
        for m in range(1, microbatches + 1):
            if kind == "interleaved" and m % p:
                continue
            yield build_schedule(kind, p, m, chunks)
            if (kind, chunks) == ("forward", 2):
                yield build_schedule(kind, p, m, chunks, v_shape=True)


def action(text: str) -> Action:
    """From "F0.3"."""
    chunk, microbatch = text[1:].split(".")
    return Action(Op(text[0]), int(chunk), int(microbatch))


def lines(program: Program) -> list[list[str]]:
    """Each stage's instructions as text."""
    return [[str(instruction) for instruction in stage] for stage in program.stages]
