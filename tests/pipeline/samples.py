"""Schedules for sweeps: every kind in every small size that it allows."""

from __future__ import annotations

from collections.abc import Iterator

from megazero.pipeline.actions import Action, Op, Program, Schedule
from megazero.pipeline.schedules import build_schedule, interleaved_warmup
from megazero.pipeline.simulate import Timeline

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


def activation_bound(
    kind: str, stages: int, microbatches: int, chunks_per_stage: int = 1, group: int | None = None
) -> tuple[int, ...]:
    """Per stage, the most (micro-batch, chunk) activations alive at once, as published for the schedule.

    An activation lives from its forward to the end of its backward (its weight gradient, where split).
    For zb-h1, every stage has the bound of 1F1B's first stage: held-back weight gradients keep activations.
    """
    every = {
        "gpipe": microbatches,
        "zb-h1": min(microbatches, stages),
        "zb-v": 2 * min(microbatches, stages),
        "forward": 1,
    }
    if kind in every:
        return (every[kind],) * stages
    warmups = (interleaved_warmup(stages, chunks_per_stage, stage, group) for stage in range(stages))
    return tuple(min(microbatches * chunks_per_stage, warmup + 1) for warmup in warmups)


def gaps(timeline: Timeline) -> tuple[float, ...]:
    """Per stage, the time that it idles between its first and its last action."""
    return tuple(
        spans[-1].end - spans[0].start - busy
        for spans, busy in zip(timeline.spans, timeline.busy, strict=True)
    )


def action(text: str) -> Action:
    """From "F0.3"."""
    chunk, microbatch = text[1:].split(".")
    return Action(Op(text[0]), int(chunk), int(microbatch))


def lines(program: Program) -> list[list[str]]:
    """Each stage's instructions as text."""
    return [[str(instruction) for instruction in stage] for stage in program.stages]
