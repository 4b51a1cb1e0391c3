"""A stage of a pipeline on paper: what its ranks hold, move and compute in a step of any number of micro-batches."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from megazero.pipeline.actions import Action, Exchange, Op, Program
from megazero.plan.trace import Section, Trace
from megazero.plan.work import Call, Kernel

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
        ranks: how many ranks hold it.
        trace: the trace of one of them, or of a stage that holds like parts.
        program: the step's program.
    """

    stage: int
    ranks: int
    trace: Trace
    program: Program

    @cached_property
    def timeline(self) -> list[tuple[str, int, int]]:
        """Over the step: an action, the most bytes of results while it runs, and those that are left after it.

        Results are activations, gradients on their way, and what operators need for a moment.
        """
        line, alive = [], 0
        for instruction, section in self.trace.steps(self.program, self.stage):
            if section is None:
                continue
            name = UPDATE if instruction is None else str(instruction)
            line.append((name, alive + section.most, alive + section.left))
            alive += section.left
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
    def device_bytes(self) -> int:
        """Bytes on the device at the peak."""
        return sum(self.memory["device"].values())

    @cached_property
    def sections(self) -> Counter[tuple[Op, int, str] | None]:
        """How often a step runs each section of the trace; None is the update."""
        counts: Counter[tuple[Op, int, str] | None] = Counter({None: 1})
        for instruction in self.program.stages[self.stage]:
            if isinstance(instruction, Action):
                counts[self.trace.key(instruction, self.program, self.stage)] += 1
        return counts

    def section(self, key: tuple[Op, int, str] | None) -> Section:
        """A section of the trace, by its key in `sections`."""
        return self.trace.tail if key is None else self.trace.actions[key]

    @cached_property
    def traffic(self) -> Counter[tuple[str, str]]:
        """Calls of a rank in a step, by group and operation; messages between stages are ``send``, ``recv``."""
        return self._traffic[0]

    @cached_property
    def payload(self) -> Counter[tuple[str, str]]:
        """Bytes of those calls, the larger side of each."""
        return self._traffic[1]

    @cached_property
    def _traffic(self) -> tuple[Counter[tuple[str, str]], Counter[tuple[str, str]]]:
        calls: Counter[tuple[str, str]] = Counter()
        payload: Counter[tuple[str, str]] = Counter()
        for key, times in self.sections.items():
            for work in self.section(key).work:
                if isinstance(work, Call):
                    calls[work.group, work.operation] += times
                    payload[work.group, work.operation] += times * work.nbytes
        for instruction in self.program.stages[self.stage]:
            if isinstance(instruction, Exchange):
                for kind, nbytes in self._messages(instruction):
                    calls["pp", kind] += 1
                    payload["pp", kind] += nbytes
        return calls, payload

    def _messages(self, exchange: Exchange) -> list[tuple[str, int]]:
        """Each message of an exchange: ``send`` or ``recv``, and its bytes."""
        chunks, sizes = self.program.schedule.chunks_of(self.stage), self.trace.messages
        return [
            *(("send", sizes["send", m.kind, chunks.index(m.chunk)]) for m in exchange.sends),
            *(("recv", sizes["recv", m.kind, chunks.index(m.receiver)]) for m in exchange.receives),
        ]

    @cached_property
    def flops(self) -> float:
        """FLOPs of matrix products and attention of a rank in a step, recomputed ones included."""
        return sum(times * self.section(key).flops for key, times in self.sections.items())

    @cached_property
    def kernels(self) -> Counter[str]:
        """Kernels that a rank starts in a step, by name."""
        counts: Counter[str] = Counter()
        for key, times in self.sections.items():
            for work in self.section(key).work:
                if isinstance(work, Kernel):
                    counts[work.name] += times
        return counts
