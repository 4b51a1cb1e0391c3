"""From a schedule to a program: pure passes that add messages, gathers and reductions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

from megazero.pipeline.actions import Action, Exchange, Instruction, Message, Op, Program, Schedule
from megazero.pipeline.simulate import Costs, Span, simulate

Instructions = tuple[Instruction, ...]  # of one stage, in order
Reductions = Mapping[Instruction, Action]  # an action that completes a gradient sum -> its `REDUCE`


def lower(
    schedule: Schedule, *, gather: bool, reduce_every_microbatch: bool, overlap_reduce: bool = True
) -> Program:
    """Return the program that the executor runs.

    Args:
        schedule: what to compute, and in which order.
        gather: whether to gather parameters before each use (ZeRO stage 3).
        reduce_every_microbatch: whether gradients are summed over the data-parallel ranks after each
            micro-batch (ZeRO stages 2 and 3), or once per step. Without backward, nothing is reduced.
        overlap_reduce: whether gradients are reduced while backward runs, or after it.
    """
    program = add_transfers(schedule)
    program = add_reductions(program, every_microbatch=reduce_every_microbatch, overlap=overlap_reduce)
    return add_gathers(program) if gather else program


def add_transfers(schedule: Schedule) -> Program:
    """Add the sends and receives between stages, so that no message relies on buffering.

    The schedule is simulated with unit costs. The messages of all stages have one total order, by the time
    their producer ends and then by tag. Messages between the same two stages at the same time share one
    `Exchange`, and every stage reaches its exchanges in that order. So even a backend that runs one blocking
    exchange at a time in order of issue (NCCL on one communicator) cannot deadlock: both ends of the first
    unfinished exchange are always free for it.

    An exchange with a send comes right after the send's producer. One that only receives comes when its
    producer starts, as far as the order allows, so that this stage's next computation hides the transfer;
    posting it earlier would only hold its buffer longer.

    Raises:
        ScheduleError: the schedule itself cannot run.
    """
    chunks = schedule.chunks_per_stage
    # Times `chunks`, so that costs per chunk are integers and equal times compare equal.
    costs = Costs(forward=chunks, backward=2 * chunks, input=chunks, weight=chunks)
    timeline = simulate(schedule, costs)
    sent = sorted(
        (span.end, message.tag, span.start, message)
        for spans in timeline.spans
        for span in spans
        if (message := schedule.message_from(span.action)) is not None
    )
    together: defaultdict[tuple[float, frozenset[int]], list[tuple[float, Message]]] = defaultdict(list)
    for end, _, start, message in sent:
        together[end, frozenset((message.source, message.target))].append((start, message))
    exchanges: list[list[tuple[float, Exchange]]] = [[] for _ in range(schedule.stages)]
    for (end, pair), messages in together.items():
        for stage in pair:
            sends = tuple(message for _, message in messages if message.source == stage)
            receives = tuple(message for _, message in messages if message.target == stage)
            # Without a send there is one message, because the other stage ended one action at this time.
            time = end if sends else messages[0][0]
            exchanges[stage].append((time, Exchange(sends, receives)))
    return Program(schedule, tuple(map(_merge, timeline.spans, exchanges)))


def _merge(spans: Sequence[Span], exchanges: list[tuple[float, Exchange]]) -> Instructions:
    """Merge a stage's actions, ordered by end time, with its exchanges, which keep their order."""
    entries: list[tuple[float, int, Instruction]] = [(span.end, 0, span.action) for span in spans]
    latest: float = 0
    for time, exchange in exchanges:
        latest = max(latest, time)
        entries.append((latest, 1, exchange))
    return tuple(instruction for _, _, instruction in sorted(entries, key=lambda entry: entry[:2]))


def add_reductions(program: Program, *, every_microbatch: bool, overlap: bool = True) -> Program:
    """Add a `REDUCE` for every micro-batch, or for the last one of each chunk.

    With `overlap`, it comes right before the action that ends the micro-batch's backward, which then reduces
    bucket by bucket. Otherwise it follows the sends of that backward's result, for which another stage waits.
    """
    place = _reductions_during if overlap else _reductions_after
    return _map_stages(program, lambda stage: place(stage, _reductions(stage, every_microbatch)))


def _reductions(instructions: Instructions, every_microbatch: bool) -> dict[Instruction, Action]:
    """Map each action that completes a gradient sum to the `REDUCE` of that sum."""
    ends = [action for action in instructions if isinstance(action, Action) and action.op.ends_backward]
    last_of_chunk = {action.chunk: action for action in ends}
    chosen = ends if every_microbatch else last_of_chunk.values()
    return {action: Action(Op.REDUCE, action.chunk, action.microbatch) for action in chosen}


def _reductions_during(instructions: Instructions, reductions: Reductions) -> Iterator[Instruction]:
    for instruction in instructions:
        if instruction in reductions:
            yield reductions[instruction]
        yield instruction


def _reductions_after(instructions: Instructions, reductions: Reductions) -> Iterator[Instruction]:
    due: Action | None = None
    for instruction in instructions:
        if due is not None and isinstance(instruction, Action):
            yield due
            due = None
        yield instruction
        due = reductions.get(instruction, due)
    if due is not None:
        yield due


def add_gathers(program: Program) -> Program:
    """Add a `GATHER` before actions that use a chunk's weights and a `RELEASE` right after them.

    A gather precedes the receives of its action, and any weight gradients and reductions before it: they use
    no weights, so they hide the gather. A chunk stays gathered if its stage uses no other chunk before its
    next use. A gather names the first micro-batch that needs it, a release the last one.
    """
    return _map_stages(program, _with_gathers)


def _with_gathers(instructions: Instructions) -> Iterator[Instruction]:
    uses = [action for action in instructions if isinstance(action, Action) and action.op.uses_weights]
    turns = [
        (before, after)
        for before, after in zip([None, *uses], [*uses, None], strict=True)
        if before is None or after is None or before.chunk != after.chunk
    ]
    ends, begins = {before for before, _ in turns}, {after for _, after in turns}
    after_use: list[Instruction] = []  # held back until the next gather: weight gradients and what follows
    for instruction in instructions:
        if instruction in begins:
            yield Action(Op.GATHER, instruction.chunk, instruction.microbatch)
        if isinstance(instruction, Action) and instruction.op.uses_weights:
            yield from after_use
            after_use = []
            yield instruction
            if instruction in ends:
                yield Action(Op.RELEASE, instruction.chunk, instruction.microbatch)
        elif isinstance(instruction, Action) or after_use:
            after_use.append(instruction)
        else:
            yield instruction
    yield from after_use


def _map_stages(program: Program, change: Callable[[Instructions], Iterator[Instruction]]) -> Program:
    return Program(program.schedule, tuple(tuple(change(instructions)) for instructions in program.stages))
