"""`Rescaled`: a rule beside another one, at a learning rate of its own."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from megazero.optim.rule import Needs, Pieces, UpdateRule


@dataclass(frozen=True)
class Rescaled(UpdateRule):
    """A rule whose learning rate is a multiple of the optimizer's, and moves with it.

    Attributes:
        rule: the rule, which needs nothing beyond its pieces.
        factor: the multiple.
    """

    rule: UpdateRule
    factor: float

    @property
    def needs(self) -> Needs:
        return self.rule.needs

    @property
    def state_names(self) -> tuple[str, ...]:
        return self.rule.state_names

    def init_state(self, like: Tensor) -> dict[str, Tensor]:
        return self.rule.init_state(like)

    def step(self, pieces: Pieces, lr: float) -> None:
        self.rule.step(pieces, lr * self.factor)
