"""Concerns: callbacks after each step that return a verdict. The strongest verdict decides.

Guards, evaluations, saving and requests to stop are concerns. They run on every rank, in the same order, and
return the same verdicts there.
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
        state: the state to continue with; None leaves it as it is.
        reason: the reason to stop, for a person.
        error: the error that ends the run.
    """

    strength: Strength = Strength.CONTINUE
    state: TrainState | None = None
    reason: str = ""
    error: MegazeroError | None = None

    def or_stronger(self, other: Verdict) -> Verdict:
        """The stronger verdict (of equal ones `self`), with the latest state."""
        stronger = other if other.strength > self.strength else self
        return replace(stronger, state=other.state or self.state)


CONTINUE = Verdict()
SAVE = Verdict(Strength.SAVE)


def go_on(state: TrainState) -> Verdict:
    """Continue with an updated state."""
    return Verdict(state=state)


def stop(reason: str) -> Verdict:
    """Save and end the run after this step."""
    return Verdict(Strength.STOP, reason=reason)


def go_back(state: TrainState) -> Verdict:
    """Continue from an earlier state, which the engine has already loaded."""
    return Verdict(Strength.GO_BACK, state)


def fail(error: MegazeroError) -> Verdict:
    """End the run with an error on all ranks, after checkpoints in progress have become visible."""
    return Verdict(Strength.FAIL, error=error)


@dataclass(frozen=True)
class StepContext:
    """A run after a step.

    Attributes:
        state: the progress of the run, this step included.
        step: the step's place in the plan: its samples and sizes.
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
        """Whether the iteration is a multiple of `interval`; never if that is None or 0."""
        return bool(interval) and self.state.iteration % (interval or 1) == 0


class Concern:
    """A callback of the training loop; its methods do nothing unless overridden."""

    def stands_at(self, state: TrainState) -> None:
        """Take note that the run begins at this state, or went back to it."""

    def after(self, now: StepContext) -> Verdict:
        """Act after a step."""
        return CONTINUE


class SharedConcern(Concern):
    """A concern whose verdict depends on numbers of all ranks; several of them share one reduction."""

    def sees(self, now: StepContext) -> Sequence[float]:
        """Return this rank's numbers; their count must be the same on all ranks."""
        return ()

    def agreed(self, now: StepContext, most: Sequence[float]) -> Verdict:
        """Return the verdict, given the maximum of each number over all ranks."""
        return CONTINUE


class JointConcerns(Concern):
    """Runs shared concerns with one reduction, because each reduction makes a step wait for all ranks."""

    def __init__(self, concerns: Sequence[SharedConcern], context: ParallelContext):
        self.concerns = concerns
        self.context = context

    def stands_at(self, state: TrainState) -> None:
        for concern in self.concerns:
            concern.stands_at(state)

    def after(self, now: StepContext) -> Verdict:
        seen = [concern.sees(now) for concern in self.concerns]
        # Reduced on the host: on the device it would wait for the queued update.
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
    """Bad steps in a row, without the overflows by which a dynamic loss scale finds its value."""
    return engine.scaler_state.overflows_at_floor if engine.scaler.searches else state.bad_in_a_row


def failing(engine: Engine, state: TrainState) -> bool:
    """Whether more than one step in a row was bad; nothing is saved then."""
    return _bad_steps(engine, state) > 1


def healthy(engine: Engine, state: TrainState) -> bool:
    """Whether the run has no recent spike and no bad steps in a row."""
    calm = state.recent is None or state.recent.calm(state.iteration)
    return calm and not _bad_steps(engine, state)
