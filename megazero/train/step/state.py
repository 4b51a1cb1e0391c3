"""The progress of a run, as checkpoints keep it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megazero.config.steps import Progress, Step
from megazero.train.step.spikes import Recent
from megazero.train.step.stability import Stability


@dataclass(frozen=True)
class TrainState:
    """The progress of a run.

    Attributes:
        iteration: number of steps done, including skipped ones.
        consumed_samples: number of sequences trained on.
        consumed_tokens: number of tokens trained on.
        skipped: number of steps without an update, because a gradient was not finite or nothing in the global
            batch counted.
        stability: statistics of the updates; None unless they are asked for.
        bad_in_a_row: number of latest steps that were skipped because numbers were not finite, or because a
            guard held their updates.
        recent: the latest updates and the latest spike; None unless spikes are looked for.
        set_aside: samples that are not trained on, as ranges of places in the training order, from and to.
    """

    iteration: int = 0
    consumed_samples: int = 0
    consumed_tokens: int = 0
    skipped: int = 0
    stability: Stability | None = None
    bad_in_a_row: int = 0
    recent: Recent | None = None
    set_aside: tuple[tuple[int, int], ...] = ()

    def after(
        self, step: Step, skipped: bool, stability: Stability | None = None, *, bad: bool = False
    ) -> TrainState:
        """The state after `step`.

        A step that was skipped because nothing counted leaves `bad_in_a_row` as it is.

        Args:
            step: the step that was done.
            skipped: whether it made no update.
            stability: statistics of the updates, this one included.
            bad: whether it was skipped because a number was not finite or a guard held it.
        """
        done, row = step.after, self.bad_in_a_row
        return replace(
            self,
            iteration=done.iteration,
            consumed_samples=done.samples,
            consumed_tokens=done.tokens,
            skipped=self.skipped + skipped,
            stability=stability,
            bad_in_a_row=row + 1 if bad else row if skipped else 0,
        )

    @property
    def progress(self) -> Progress:
        """The samples and tokens consumed, as schedules and the training plan count them."""
        return Progress(self.iteration, self.consumed_samples, self.consumed_tokens)
