"""One update rule for parameter groups whose options differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megazero.errors import ConfigError
from megazero.optim.rule import Needs, Pieces, UpdateRule

Groups = Sequence[Mapping[str, Any]]
"""Parameter groups of a torch optimizer."""


class GroupRate(float):
    """The learning rate of a group, which knows the group: equal rates of two groups are not equal."""

    group: int

    def __new__(cls, rate: float, group: int) -> GroupRate:
        made = super().__new__(cls, rate)
        made.group = group
        return made

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GroupRate) and self.group == other.group and float(self) == float(other)

    def __ne__(self, other: object) -> bool:  # `float` has one of its own
        return not self == other

    def __hash__(self) -> int:
        return hash((self.group, float(self)))


@dataclass(frozen=True)
class GroupedRule(UpdateRule):
    """A rule for each parameter group; the learning rate, a `GroupRate`, says which group pieces are of.

    Attributes:
        rules: the rules, which keep the same state, and need nothing but their pieces.
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
    """One rule for all groups, from the rule that the options of each describe.

    Raises:
        ConfigError: the options differ, and `kind` looks at whole parameters, or keeps other state for some.
    """
    first = rules[0]
    if all(rule == first for rule in rules):
        return first
    alone = Needs(one_pass=first.needs.one_pass)
    if any(rule.needs != alone or rule.state_names != first.state_names for rule in rules):
        left = ("params", "lr", "weight_decay")
        differ = [k for k in groups[0] if k not in left and any(g.get(k) != groups[0][k] for g in groups)]
        values = [[group.get(name) for group in groups] for name in differ]
        raise ConfigError(
            f"`{', '.join(differ)}` must be the same in every parameter group of {kind}, but is {values}: "
            "its update looks at whole parameters, or would keep other state for some"
        )
    return GroupedRule(tuple(rules))


def rates(rule: UpdateRule, groups: Groups) -> list[float]:
    """The learning rates of the groups, as the rule takes them."""
    if isinstance(rule, GroupedRule):
        return [GroupRate(rate_of(group), number) for number, group in enumerate(groups)]
    return [rate_of(group) for group in groups]


def rate_of(group: Mapping[str, Any]) -> float:
    """A group's learning rate; 0 for an optimizer that chooses its own, and does not read it."""
    return 0.0 if group["lr"] is None else float(group["lr"])
