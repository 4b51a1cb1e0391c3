"""How far a run has got."""

from __future__ import annotations

from dataclasses import dataclass

from megazero.config.steps import Progress, Step
from megazero.train.stability import Stability


@dataclass(frozen=True)
class TrainState:
    """How far a run has got.

    Attributes:
        iteration: number of steps done, including skipped ones.
        consumed_samples: number of sequences trained on.
        consumed_tokens: number of tokens trained on.
        skipped: number of steps without an update, because a gradient was not finite or nothing in the global
            batch counted.
        stability: how steady the updates were; None unless it is to be known.
    """

    iteration: int = 0
    consumed_samples: int = 0
    consumed_tokens: int = 0
    skipped: int = 0
    stability: Stability | None = None

    def after(self, step: Step, skipped: bool, stability: Stability | None = None) -> TrainState:
        """The state after one more step, the one that follows `progress`."""
        done = step.after
        return TrainState(done.iteration, done.samples, done.tokens, self.skipped + skipped, stability)

    @property
    def progress(self) -> Progress:
        """What has been consumed, as the schedules and the horizon count it."""
        return Progress(self.iteration, self.consumed_samples, self.consumed_tokens)
