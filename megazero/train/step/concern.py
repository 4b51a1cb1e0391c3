"""A concern looks at a run after each step and returns a verdict; the strongest verdict wins.

Guards, evaluations, saving and requests to stop are concerns. They all run on every rank, in the same order,
and come to the same verdict there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

import torch

from megazero.config.steps import Step
from megazero.errors import MegazeroError
from megazero.mpu.context import ParallelContext, host_groups
from megazero.train.step.engine import Engine, StepResult
from megazero.train.step.state import TrainState


class Strength(IntEnum):
    """The kinds of verdicts, from the weakest to the strongest."""

    CONTINUE = 0
    SAVE = 1
    STOP = 2
    GO_BACK = 3
    FAIL = 4


@dataclass(frozen=True)
class Verdict:
    """The answer of a concern.

    Attributes:
        strength: the kind of verdict.
        state: the state to go on with; None leaves it as it is.
        reason: the reason to stop, for a person.
        error: the error that ends the run.
    """

    strength: Strength = Strength.CONTINUE
    state: TrainState | None = None
    reason: str = ""
    error: MegazeroError | None = None

    def or_stronger(self, other: Verdict) -> Verdict:
        """The stronger of two verdicts, the first of equal ones, with the latest state."""
        stronger = other if other.strength > self.strength else self
        return replace(stronger, state=other.state or self.state)


CONTINUE = Verdict()
SAVE = Verdict(Strength.SAVE)


def go_on(state: TrainState) -> Verdict:
    """Go on from this state, which has been added to."""
    return Verdict(state=state)


def stop(reason: str) -> Verdict:
    """End the run after this step, and save it."""
    return Verdict(Strength.STOP, reason=reason)


def go_back(state: TrainState) -> Verdict:
    """Go on from an earlier state, which the engine holds already."""
    return Verdict(Strength.GO_BACK, state)


def fail(error: MegazeroError) -> Verdict:
    """End the run with an error, which all ranks raise; checkpoints that are being written become visible."""
    return Verdict(Strength.FAIL, error=error)


@dataclass(frozen=True)
class Moment:
    """A run after a step.

    Attributes:
        state: the progress of the run, this step included.
        step: the samples that the step consumed.
        result: the result of the step.
        ends: whether it is the last step of the training.
        verdict: the strongest verdict so far.
    """

    state: TrainState
    step: Step
    result: StepResult
    ends: bool
    verdict: Verdict = CONTINUE

    def due(self, interval: int | None) -> bool:
        """Whether the step ends an interval of so many iterations; never without one, or with one of 0."""
        return bool(interval) and self.state.iteration % (interval or 1) == 0


class Concern:
    """Looks at a run after each step. A concern that derives from this class defines only what it needs."""

    def stands_at(self, state: TrainState) -> None:
        """The run begins at this state, or went back to it."""

    def after(self, now: Moment) -> Verdict:
        """Look at the run after a step."""
        return CONTINUE


class SharedConcern(Concern):
    """A concern whose verdict depends on what all ranks see; several of them share one reduction."""

    def sees(self, now: Moment) -> Sequence[float]:
        """Return this rank's numbers, as many as on all other ranks."""
        return ()

    def agreed(self, now: Moment, most: Sequence[float]) -> Verdict:
        """Return the verdict; `most` has the maxima of these numbers over all ranks."""
        return CONTINUE


class Together(Concern):
    """Concerns that share one reduction, since each by itself would make a step wait for the other ranks.

    Args:
        concerns: these concerns.
        context: all ranks.
    """

    def __init__(self, concerns: Sequence[SharedConcern], context: ParallelContext):
        self.concerns = concerns
        self.context = context

    def stands_at(self, state: TrainState) -> None:
        for concern in self.concerns:
            concern.stands_at(state)

    def after(self, now: Moment) -> Verdict:
        seen = [concern.sees(now) for concern in self.concerns]
        # On the host, which would otherwise wait for the update that is queued.
        numbers = torch.tensor([x for numbers in seen for x in numbers])
        for group in host_groups(self.context):
            group.all_reduce(numbers, "max").wait()
        most, verdict = numbers.tolist(), now.verdict
        for concern, own in zip(self.concerns, seen, strict=True):
            verdict = verdict.or_stronger(concern.agreed(now, most[: len(own)]))
            if verdict.strength is Strength.FAIL:
                break
            most = most[len(own) :]
        return verdict


def _bad_steps(engine: Engine, state: TrainState) -> int:
    """Bad steps in a row; in the search for a loss scale, overflows are how the scale is found."""
    return engine.scaler_state.overflows_at_floor if engine.scaler.searches else state.bad_in_a_row


def failing(engine: Engine, state: TrainState) -> bool:
    """Whether steps keep being bad, apart from the search for a loss scale; nothing is saved then."""
    return _bad_steps(engine, state) > 1


def healthy(engine: Engine, state: TrainState) -> bool:
    """Whether the guards know of nothing that is wrong with a run in this state."""
    calm = state.recent is None or state.recent.calm(state.iteration)
    return calm and not _bad_steps(engine, state)
