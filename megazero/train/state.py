"""How far a run has come."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megazero.optim import Progress


@dataclass(frozen=True)
class TrainState:
    """Attributes:
    iteration: steps done, skipped ones included.
    consumed_samples: sequences trained on.
    consumed_tokens: tokens trained on.
    skipped: steps without an update, for gradients that were not finite.
    """

    iteration: int = 0
    consumed_samples: int = 0
    consumed_tokens: int = 0
    skipped: int = 0

    def after(self, samples: int, tokens: int, skipped: bool) -> TrainState:
        """The state after one more step."""
        return replace(
            self,
            iteration=self.iteration + 1,
            consumed_samples=self.consumed_samples + samples,
            consumed_tokens=self.consumed_tokens + tokens,
            skipped=self.skipped + skipped,
        )

    @property
    def progress(self) -> Progress:
        """What the schedules read."""
        return Progress(self.iteration, self.consumed_samples, self.consumed_tokens)
