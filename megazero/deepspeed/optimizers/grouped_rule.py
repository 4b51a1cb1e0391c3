"""`GroupedRule`: one update rule for parameter groups with different options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megazero.deepspeed.optimizers.fused import Options
from megazero.errors import ConfigError
from megazero.optim.rule import Needs, Pieces, UpdateRule

Groups = Sequence[Options]
"""Parameter groups of a torch optimizer."""


class GroupRate(float):
    """A learning rate with the number of its group; equal rates of two groups compare as different."""

    group: int

    def __new__(cls, rate: float, group: int) -> GroupRate:
        made = super().__new__(cls, rate)
        made.group = group
        return made

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GroupRate) and self.group == other.group and float(self) == float(other)

    def __ne__(self, other: object) -> bool:  # overrides that of `float`
        return not self == other

    def __hash__(self) -> int:
        return hash((self.group, float(self)))


@dataclass(frozen=True)
class GroupedRule(UpdateRule):
    """A rule for each parameter group; the learning rate, a `GroupRate`, has the number of the group.

    Attributes:
        rules: the rules; they keep the same state, and need nothing but pieces.
    """

    rules: tuple[UpdateRule, ...]

    @property
    def needs(self) -> Needs:
        return self.rules[0].needs

    @property
    def state_names(self) -> tuple[str, ...]:
        return self.rules[0].state_names

    def step(self, pieces: Pieces, lr: float) -> None:
        assert isinstance(lr, GroupRate), "`rates` makes the learning rates"
        self.rules[lr.group].step(pieces, float(lr))


def together(rules: Sequence[UpdateRule], groups: Groups, kind: str) -> UpdateRule:
    """Combine the rules of all groups into one.

    Raises:
        ConfigError: the rules differ, and they need whole parameters or keep different state.
    """
    first = rules[0]
    if all(rule == first for rule in rules):
        return first
    only_pieces = Needs(one_pass=first.needs.one_pass)
    if any(rule.needs != only_pieces or rule.state_names != first.state_names for rule in rules):
        free = ("params", "lr", "weight_decay")
        different = [k for k in groups[0] if k not in free and any(g.get(k) != groups[0][k] for g in groups)]
        values = [[group.get(name) for group in groups] for name in different]
        raise ConfigError(
            f"`{', '.join(different)}` must be the same in every parameter group of {kind}, but is {values}: "
            "its update looks at whole parameters, or would keep other state for some"
        )
    return GroupedRule(tuple(rules))


def rates(rule: UpdateRule, groups: Groups) -> list[float]:
    """The learning rates of the groups, as `GroupRate` for a `GroupedRule`."""
    if isinstance(rule, GroupedRule):
        return [GroupRate(rate_of(group), number) for number, group in enumerate(groups)]
    return [rate_of(group) for group in groups]


def rate_of(group: Options) -> float:
    """A group's learning rate; 0 for None, with which an optimizer (Adafactor) chooses its own."""
    return 0.0 if group["lr"] is None else float(group["lr"])
