"""A stage of a pipeline on paper: what a rank of it holds, moves and computes in a step of any length."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from megazero.account.profilers.calls import Call
from megazero.pipeline.actions import Action, Exchange, Message, Program
from megazero.plan.trace import MessageFacts, Section, Trace

UPDATE = "the update"


@dataclass(frozen=True)
class Peak:
    """The moment of a step at which a rank holds most.

    Attributes:
        when: the action in schedule letters (``F0.3``), or `UPDATE`.
        nbytes: what operators' results take then, beyond what is held between steps.
    """

    when: str
    nbytes: int


@dataclass(frozen=True)
class StagePlan:
    """One stage in a step.

    Attributes:
        stage: its number.
        line: for each stage, a rank of the pipeline that this rank is in.
        trace: the trace of one of them, or of a stage that holds like parts.
        program: the step's program.
    """

    stage: int
    line: Sequence[int]
    trace: Trace
    program: Program

    @cached_property
    def timeline(self) -> list[tuple[str, int, int]]:
        """Over the step: an action, the most bytes of results while it runs, and those left after it.

        Results are activations, gradients on their way, and what operators need for a moment.
        """
        line, alive, held = [], 0, Counter[Action]()
        sent: deque[int] = deque()  # bytes of the exchanges whose sends are not awaited yet
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
                        held[Action(facts.until, chunk, message.microbatch)] += facts.nbytes
                if instruction.sends:
                    sent.append(waited)
            elif instruction is None:
                alive -= sum(sent)
            if section is None:
                continue
            most, alive = alive + section.most, alive + section.left
            if isinstance(instruction, Action):
                alive -= held.pop(instruction, 0)
            line.append((UPDATE if instruction is None else str(instruction), most, alive))
        return line

    @cached_property
    def peak(self) -> Peak:
        """The moment at which results take most."""
        name, most, _ = max(self.timeline, key=lambda moment: moment[1])
        return Peak(name, most)

    @cached_property
    def memory(self) -> dict[str, dict[str, int]]:
        """Bytes by place and kind at the peak, as `memory-report` has them after a step."""
        places = {place: dict(kinds) for place, kinds in self.trace.held.items()}
        places["device"]["activations"] = max(0, self.peak.nbytes - self.trace.buffers)
        return places

    @property
    def resting(self) -> int:
        """Bytes on the device between steps, with the buffers that stay."""
        return sum(self.trace.held["device"].values()) - self.trace.buffers

    @property
    def device_bytes(self) -> int:
        """Bytes on the device at the peak."""
        return sum(self.memory["device"].values())

    @cached_property
    def sections(self) -> list[tuple[Section, int]]:
        """The sections of a step, and how often it runs each."""
        steps = [section for _, section in self.trace.steps(self.program, self.stage) if section is not None]
        counts = Counter(map(id, steps))
        return [(section, counts[number]) for number, section in {id(s): s for s in steps}.items()]

    @cached_property
    def traffic(self) -> Counter[tuple[str, str]]:
        """Calls of a rank in a step, by group and operation; messages are ``send`` and ``recv``."""
        return self._traffic[0]

    @cached_property
    def groups(self) -> dict[str, Sequence[int]]:
        """The ranks of each group that is called in a step; of messages, those of a whole pipeline."""
        calls = (w for section, _ in self.sections for w in section.work if isinstance(w, Call))
        return {"pp": self.line, **{call.group: call.ranks for call in calls}}

    def reach(self, group: str, per_node: int) -> str:
        """The links that a group's calls go over, with so many ranks on a node.

        ``node``: none but those within; ``rail``: between equal places of nodes; ``across``: others.
        """
        ranks = self.groups[group]
        if len({rank // per_node for rank in ranks}) == 1:
            return "node"
        return "rail" if len({rank % per_node for rank in ranks}) == 1 else "across"

    @cached_property
    def payload(self) -> Counter[tuple[str, str]]:
        """Bytes of those calls, the larger side of each."""
        return self._traffic[1]

    @cached_property
    def _traffic(self) -> tuple[Counter[tuple[str, str]], Counter[tuple[str, str]]]:
        calls: Counter[tuple[str, str]] = Counter()
        payload: Counter[tuple[str, str]] = Counter()
        for section, times in self.sections:
            for work in section.work:
                if isinstance(work, Call):
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
    def messages(self) -> list[Call]:
        """A message of each kind that a rank sends to another stage."""
        sent = (
            (message, facts.nbytes)
            for instruction in self.program.stages[self.stage]
            if isinstance(instruction, Exchange)
            for message, facts, _ in self._messages(instruction)
            if message.source == self.stage
        )
        ways = {(m.kind, m.chunk): (m, nbytes) for m, nbytes in sent}
        return [
            Call("pp", "send", nbytes, (self.line[m.source], self.line[m.target]))
            for m, nbytes in ways.values()
        ]

    def _messages(self, exchange: Exchange) -> Iterator[tuple[Message, MessageFacts, int]]:
        """The messages of an exchange, sends first: what is known of each, and the chunk here."""
        chunks, known = self.program.schedule.chunks_of(self.stage), self.trace.messages
        for message in exchange.sends:
            yield message, known["send", message.kind, chunks.index(message.chunk)], message.chunk
        for message in exchange.receives:
            yield message, known["recv", message.kind, chunks.index(message.receiver)], message.receiver

    @cached_property
    def flops(self) -> float:
        """FLOPs of matrix products and attention of a rank in a step, recomputed ones included."""
        return sum(times * section.flops for section, times in self.sections)
