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
        skipped: number of steps without an update, because a gradient was not finite or no token of the
            global batch had a loss.
        stability: statistics of the updates; None unless they are logged.
        bad_in_a_row: number of latest steps in a row that were skipped because numbers were not finite, or
            because a guard held their updates.
        recent: the latest updates and the latest spike; None unless spikes are detected.
        set_aside: samples that are skipped after a rollback, as ranges (start, stop) in the training order.
        not_updated: the part of `progress` whose steps made no update. Steps that versions before this field
            skipped are not in it, because they advanced the schedules.
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

        An empty step, without any loss, leaves `bad_in_a_row` as it is.

        Args:
            skipped: whether it made no update.
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
        """The progress of steps with an update, by which learning rate and weight decay are scheduled."""
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
