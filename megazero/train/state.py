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
        bad_in_a_row: of the latest steps, how many had a gradient that was not finite.
    """

    iteration: int = 0
    consumed_samples: int = 0
    consumed_tokens: int = 0
    skipped: int = 0
    stability: Stability | None = None
    bad_in_a_row: int = 0

    def after(
        self, step: Step, skipped: bool, stability: Stability | None = None, *, bad: bool = False
    ) -> TrainState:
        """The state after one more step, the one that follows `progress`; `bad` if a gradient was not finite.

        A step that was skipped because nothing counted neither ends a row of bad ones nor adds to it.
        """
        done, row = step.after, self.bad_in_a_row
        row = row + 1 if bad else row if skipped else 0
        return TrainState(done.iteration, done.samples, done.tokens, self.skipped + skipped, stability, row)

    @property
    def progress(self) -> Progress:
        """What has been consumed, as the schedules and the horizon count it."""
        return Progress(self.iteration, self.consumed_samples, self.consumed_tokens)
