"""The plan of a pipeline stage: what one of its ranks holds, moves and computes in a step."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from megazero.account.profilers.calls import CollectiveCall
from megazero.pipeline.actions import Action, Exchange, Message, Program
from megazero.plan.work import MessageFacts, StepSection, Trace

UPDATE = "the update"


@dataclass(frozen=True)
class Peak:
    """The moment of a step at which a rank's memory is fullest.

    Attributes:
        when: the action in schedule letters (``F0.3``), or `UPDATE`.
        nbytes: the bytes of operators' results, beyond what is held between steps.
    """

    when: str
    nbytes: int


@dataclass(frozen=True)
class StagePlan:
    """One pipeline stage in a step.

    Attributes:
        stage: the stage's number.
        line: the ranks of one pipeline, by stage.
        trace: the trace of a rank of this stage, or of a stage with the same kinds of parts.
        program: the step's program.
    """

    stage: int
    line: Sequence[int]
    trace: Trace
    program: Program

    @cached_property
    def timeline(self) -> list[tuple[str, int, int]]:
        """(action, most bytes of results during it, bytes of results after it) over the step.

        Results are activations, gradients in flight, and temporaries of operators.
        """
        timeline, alive, freed_after = [], 0, Counter[Action]()
        sent: deque[int] = deque()  # bytes of exchanges whose sends have not been waited for
        for instruction, section in self.trace.steps(self.program, self.stage):
            if isinstance(instruction, Exchange):
                while len(sent) > 1:
                    alive -= sent.popleft()
                waited = 0
                for message, facts, chunk in self._messages(instruction):
                    alive += facts.nbytes
                    if facts.until is None:
                        waited += facts.nbytes
                    else:
                        freed_after[Action(facts.until, chunk, message.microbatch)] += facts.nbytes
                if instruction.sends:
                    sent.append(waited)
            elif instruction is None:
                alive -= sum(sent)
            if section is None:
                continue
            most, alive = alive + section.most, alive + section.left
            if isinstance(instruction, Action):
                alive -= freed_after.pop(instruction, 0)
            timeline.append((UPDATE if instruction is None else str(instruction), most, alive))
        return timeline

    @cached_property
    def peak(self) -> Peak:
        """The moment at which results take the most bytes."""
        name, most, _ = max(self.timeline, key=lambda moment: moment[1])
        return Peak(name, most)

    @cached_property
    def memory(self) -> dict[str, dict[str, int]]:
        """Bytes by place and kind at the peak, as a run measures them."""
        places = {place: dict(kinds) for place, kinds in self.trace.resting.items()}
        places["device"]["activations"] = max(0, self.peak.nbytes - self.trace.buffers)
        return places

    @property
    def resting(self) -> int:
        """Bytes on the device between steps."""
        return sum(self.trace.resting["device"].values()) - self.trace.buffers

    @property
    def device_bytes(self) -> int:
        """Bytes on the device at the peak."""
        return sum(self.memory["device"].values())

    @cached_property
    def sections(self) -> list[tuple[StepSection, int]]:
        """Each section of a step, and how often it runs."""
        steps = [section for _, section in self.trace.steps(self.program, self.stage) if section is not None]
        counts = Counter(map(id, steps))
        return [(section, counts[number]) for number, section in {id(s): s for s in steps}.items()]

    @cached_property
    def traffic(self) -> Counter[tuple[str, str]]:
        """A rank's number of calls in a step, by group and operation; messages are ``send`` and ``recv``."""
        return self._traffic[0]

    @cached_property
    def groups(self) -> dict[str, Sequence[int]]:
        """The ranks of each group that is called in a step; messages are between the ranks of a pipeline."""
        calls = (w for section, _ in self.sections for w in section.work if isinstance(w, CollectiveCall))
        return {"pp": self.line, **{call.group: call.ranks for call in calls}}

    def reach(self, group: str, per_node: int) -> str:
        """The links that a group's calls use, with `per_node` ranks on a node.

        ``node``: links inside a node; ``rail``: links between equal positions of nodes; ``across``: others.
        """
        ranks = self.groups[group]
        if len({rank // per_node for rank in ranks}) == 1:
            return "node"
        return "rail" if len({rank % per_node for rank in ranks}) == 1 else "across"

    @cached_property
    def payload(self) -> Counter[tuple[str, str]]:
        """The bytes of the calls of `traffic`, by the larger of input and output."""
        return self._traffic[1]

    @cached_property
    def _traffic(self) -> tuple[Counter[tuple[str, str]], Counter[tuple[str, str]]]:
        calls: Counter[tuple[str, str]] = Counter()
        payload: Counter[tuple[str, str]] = Counter()
        for section, times in self.sections:
            for work in section.work:
                if isinstance(work, CollectiveCall):
                    calls[work.group, work.operation] += times
                    payload[work.group, work.operation] += times * work.nbytes
        for instruction in self.program.stages[self.stage]:
            if isinstance(instruction, Exchange):
                for message, facts, _ in self._messages(instruction):
                    way = "send" if message.source == self.stage else "recv"
                    calls["pp", way] += 1
                    payload["pp", way] += facts.nbytes
        return calls, payload

    @property
    def messages(self) -> list[CollectiveCall]:
        """One message of each kind that a rank sends to another stage."""
        sent = (
            (message, facts.nbytes)
            for instruction in self.program.stages[self.stage]
            if isinstance(instruction, Exchange)
            for message, facts, _ in self._messages(instruction)
            if message.source == self.stage
        )
        ways = {(m.kind, m.chunk): (m, nbytes) for m, nbytes in sent}
        return [
            CollectiveCall("pp", "send", nbytes, (self.line[m.source], self.line[m.target]))
            for m, nbytes in ways.values()
        ]

    def _messages(self, exchange: Exchange) -> Iterator[tuple[Message, MessageFacts, int]]:
        """Yield (message, facts about it, this stage's chunk) of an exchange, sends first."""
        chunks, known = self.program.schedule.chunks_of(self.stage), self.trace.messages
        for message in exchange.sends:
            yield message, known["send", message.kind, chunks.index(message.chunk)], message.chunk
        for message in exchange.receives:
            yield message, known["recv", message.kind, chunks.index(message.receiver)], message.receiver

    @cached_property
    def flops(self) -> float:
        """A rank's FLOPs of matrix products and attention in a step, recomputation included."""
        return sum(times * section.flops for section, times in self.sections)
