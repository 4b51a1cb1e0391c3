"""The progress of a run, as checkpoints keep it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace

from megazero.config.steps import Progress, Step
from megazero.train.step.spikes import Recent
from megazero.train.step.stability import Stability


@dataclass(frozen=True)
class TrainState:
    """The progress of a run.

    Attributes:
        progress: the steps done, including skipped ones, and the samples and tokens consumed.
        skipped: number of steps without an update, because a gradient was not finite or nothing in the global
            batch counted.
        stability: statistics of the updates; None unless they are asked for.
        bad_in_a_row: number of latest steps that were skipped because numbers were not finite, or because a
            guard held their updates.
        recent: the latest updates and the latest spike; None unless spikes are looked for.
        set_aside: samples that are not trained on, as ranges of places in the training order, from and to.
        not_updated: the part of `progress` that made no update. What earlier versions skipped is no part of
            it: it has moved their schedules on.
    """

    progress: Progress = field(default_factory=Progress)
    skipped: int = 0
    stability: Stability | None = None
    bad_in_a_row: int = 0
    recent: Recent | None = None
    set_aside: tuple[tuple[int, int], ...] = ()
    not_updated: Progress = field(default_factory=Progress)

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
        row = self.bad_in_a_row
        return replace(
            self,
            progress=step.after,
            skipped=self.skipped + skipped,
            not_updated=step.after - self.updated if skipped else self.not_updated,
            stability=stability,
            bad_in_a_row=row + 1 if bad else row if skipped else 0,
        )

    @property
    def updated(self) -> Progress:
        """The progress by steps that made an update, where the schedules of rate and weight decay stand."""
        return self.progress - self.not_updated

    @property
    def iteration(self) -> int:
        """The number of steps done."""
        return self.progress.iteration

    @property
    def consumed_samples(self) -> int:
        """The number of sequences trained on."""
        return self.progress.samples

    @property
    def consumed_tokens(self) -> int:
        """The number of tokens trained on."""
        return self.progress.tokens

    def record(self) -> dict[str, object]:
        """The state as JSON."""
        values = asdict(self)
        progress = values.pop("progress")
        consumed = {f"consumed_{unit}": progress[unit] for unit in ("samples", "tokens")}
        return {"iteration": progress["iteration"], **consumed, **values}
