"""Checks whether a program can run at all: complete, in order, messages paired, free of deadlock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from megazero.pipeline.actions import Action, Exchange, Message, Op, Program, Schedule, ScheduleError


def check(program: Program) -> None:
    """Check that `program` is sound even if every exchange blocks until all its partners have reached theirs.

    Raises:
        ScheduleError: names the stage and the action or message at fault. These conditions must hold: each
            stage computes each of its actions once, after everything that the action needs; if anything is
            gathered, weights are gathered whenever they are used; if anything is reduced, all gradients are,
            and every reduction has something to reduce; both ends of every message exist, in the same order
            on both stages of each pair; no stages wait for each other in a circle.
    """
    everything = {action.op for list_ in program.stages for action in list_ if isinstance(action, Action)}
    for stage, instructions in enumerate(program.stages):
        actions = [action for action in instructions if isinstance(action, Action)]
        _check_complete(program.schedule, stage, [action for action in actions if action.op.computes])
        faults = [
            *_out_of_order(program.schedule, stage, instructions),
            *(_not_gathered(actions) if Op.GATHER in everything else ()),
            *(_not_reduced(actions) if Op.REDUCE in everything else ()),
        ]
        if faults:
            raise ScheduleError(f"Stage {stage}: {faults[0]}")
    _check_pairs(program)
    _check_rendezvous(program)


def _check_complete(schedule: Schedule, stage: int, computed: Sequence[Action]) -> None:
    counts, expected = Counter(computed), Counter(schedule.expected(stage))
    for action in expected - counts:
        raise ScheduleError(f"Stage {stage}: {action} is missing")
    for action in counts - expected:
        why = "done twice" if action in expected else "not of this stage"
        raise ScheduleError(f"Stage {stage}: {action} is {why}")


def _out_of_order(schedule: Schedule, stage: int, instructions: Sequence[Action | Exchange]) -> Iterator[str]:
    """Actions that come before their inputs are here or requested, and sends with nothing to send yet."""
    done: set[Action] = set()
    asked: set[Action] = set()
    for instruction in instructions:
        if isinstance(instruction, Exchange):
            for message in instruction.sends:
                if schedule.producer_of(message) not in done:
                    yield f"`{message}` is sent before {schedule.producer_of(message)}"
            asked.update(schedule.producer_of(message) for message in instruction.receives)
        elif instruction.op.computes:
            for need in schedule.needs(instruction):
                if schedule.stage_of[need.chunk] != stage:
                    if need not in asked:
                        yield f"{instruction} comes before the receive of {need}'s result"
                elif need not in done:
                    yield f"{instruction} comes before {need}"
            done.add(instruction)


def _not_gathered(actions: Sequence[Action]) -> Iterator[str]:
    gathered: set[int] = set()
    for action in actions:
        if action.op is Op.GATHER:
            if action.chunk in gathered:
                yield f"{action} gathers what is gathered"
            gathered.add(action.chunk)
        elif action.op is Op.RELEASE:
            gathered.discard(action.chunk)
        elif action.op.uses_weights and action.chunk not in gathered:
            yield f"{action} comes while chunk {action.chunk} is not gathered"
    if gathered:
        yield f"chunk {min(gathered)} is never released"


def _not_reduced(actions: Sequence[Action]) -> Iterator[str]:
    """Gradients that are never reduced, and reductions that have nothing to reduce."""
    pending: dict[int, Action] = {}  # by chunk: the last action whose gradients are still to be reduced
    ended: set[tuple[int, int]] = set()
    announced: dict[tuple[int, int], Action] = {}  # reductions whose backward has not ended yet
    for action in actions:
        key = (action.chunk, action.microbatch)
        if action.op.ends_backward:
            ended.add(key)
            if announced.pop(key, None) is None:
                pending[action.chunk] = action
            else:
                pending.pop(action.chunk, None)
        elif action.op is Op.REDUCE and key in ended:
            if pending.pop(action.chunk, None) is None:
                yield f"{action} finds nothing to reduce"
        elif action.op is Op.REDUCE:
            if key in announced:
                yield f"{action} comes twice before its backward"
            announced[key] = action
    for action in announced.values():
        yield f"{action} reduces no backward of this stage"
    for action in pending.values():
        yield f"no reduction takes the gradients of {action}"


def _check_pairs(program: Program) -> None:
    """Check that both ends of every message exist, and that two stages exchange messages in one order."""
    exchanges = [
        (stage, instruction)
        for stage, list_ in enumerate(program.stages)
        for instruction in list_
        if isinstance(instruction, Exchange)
    ]
    sends = [(stage, message) for stage, exchange in exchanges for message in exchange.sends]
    receives = [(stage, message) for stage, exchange in exchanges for message in exchange.receives]
    strays = [(s, m) for s, m in sends if s != m.source] + [(s, m) for s, m in receives if s != m.target]
    strays += [(s, m) for s, m in sends if m != _due(program.schedule, m)]
    for stage, message in strays:
        raise ScheduleError(f"Stage {stage}: `{message}` is not one of its messages in this schedule")
    sent, received = Counter(m for _, m in sends), Counter(m for _, m in receives)
    for message in sent - received:
        raise ScheduleError(f"`{message}` is sent, but not received")
    for message in received - sent:
        raise ScheduleError(f"`{message}` is received, but not sent")
    for message, count in sent.items():
        if count > 1:
            raise ScheduleError(f"`{message}` is sent {count} times")
    for pair in {(message.source, message.target) for message in sent}:
        outgoing = [m for _, m in sends if (m.source, m.target) == pair]
        incoming = [m for _, m in receives if (m.source, m.target) == pair]
        for left, right in zip(outgoing, incoming, strict=True):
            if left != right:
                raise ScheduleError(f"Stage {pair[0]} sends `{left}` when stage {pair[1]} receives `{right}`")


def _due(schedule: Schedule, message: Message) -> Message | None:
    """The message that the schedule asks for in place of `message`."""
    return schedule.message_from(schedule.producer_of(message))


def _check_rendezvous(program: Program) -> None:
    """Run with every exchange waiting until its partners have reached theirs; computing takes no time."""
    exchanges = [
        [instruction for instruction in list_ if isinstance(instruction, Exchange)]
        for list_ in program.stages
    ]
    place = {
        (stage, message): number
        for stage, list_ in enumerate(exchanges)
        for number, exchange in enumerate(list_)
        for message in exchange.messages
    }
    position = [0] * len(exchanges)

    def waits_for(stage: int) -> list[int]:
        """The partners that have not reached their end of the exchange that `stage` is at."""
        messages = exchanges[stage][position[stage]].messages
        peers = [(m.source + m.target - stage, m) for m in messages]
        return [peer for peer, message in peers if position[peer] < place[peer, message]]

    def at_end(stage: int) -> bool:
        return position[stage] == len(exchanges[stage])

    moved = True
    while moved:
        moved = False
        for stage in range(len(exchanges)):
            while not at_end(stage) and not waits_for(stage):
                position[stage] += 1
                moved = True
    waits = [
        f"stage {stage} waits at `{exchanges[stage][position[stage]]}` for stage {waits_for(stage)[0]}"
        for stage in range(len(exchanges))
        if not at_end(stage)
    ]
    if waits:
        raise ScheduleError(f"The exchanges deadlock: {'; '.join(waits)}")
