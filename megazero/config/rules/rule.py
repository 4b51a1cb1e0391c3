"""Cross-field rules: `rule` makes one of a predicate, and a violation is a sentence with the values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from types import MappingProxyType
from typing import Any

from megazero.config.condition import Condition, Need
from megazero.config.derive import model_ranks
from megazero.config.fields import FIELD_BY_PATH, FIELDS, check_needs, spoken
from megazero.config.steps import BatchRamp, Progress, Steps
from megazero.config.training_plan import Limits
from megazero.config.tree.config import Config
from megazero.config.tree.model import ModelConfig
from megazero.config.tree.parallel import ParallelConfig

MOST_INCREMENTS = 100_000
"""The most increments of a batch-size ramp: each is a segment of the training that is judged by itself."""

_NAME_COUNTS = MappingProxyType(Counter(spec.name for spec in FIELDS))

_GETTERS = MappingProxyType({spec.path: attrgetter(spec.path) for spec in FIELDS})


@dataclass(frozen=True)
class Case:
    """A configuration to be judged, and its number of ranks, if that is known."""

    config: Config
    world_size: int | None = None

    @property
    def model(self) -> ModelConfig:
        """The settings of the model."""
        return self.config.model

    @property
    def parallel(self) -> ParallelConfig:
        """The layout of ranks."""
        return self.config.parallel

    @property
    def data_parallel(self) -> int | None:
        """Replicas of the model; None while the world size is unknown or does not factor."""
        ranks = model_ranks(self.config)
        if self.world_size is None or self.world_size % ranks:
            return None
        return self.world_size // ranks

    @cached_property
    def steps(self) -> Steps | None:
        """The steps of the training; None if replicas or the ramp's end are unknown, or a step is empty."""
        batch = self.config.batch
        if self.data_parallel is None or (batch.rampup_batch_size and batch.global_batch_size is None):
            return None
        if BatchRamp.of(batch, self.config.model, self.data_parallel).increments > MOST_INCREMENTS:
            return None
        steps = Steps.of(self.config, self.data_parallel)
        # A curriculum may ask for rows longer than a sample, so that there are none; another rule refuses it.
        return steps if all(steps.lengths.rows(length) for _, length in steps.lengths.pieces) else None

    @property
    def end(self) -> Progress | None:
        """The progress when the training stops; None while its steps or its length are unknown."""
        limits = Limits.of(self.config.training)
        return None if self.steps is None or limits == Limits() else limits.end(self.steps)


@dataclass(frozen=True)
class Rule:
    """One row of the compatibility table.

    Attributes:
        name: the rule's name in messages, docs and tests.
        fields: the `paths` of the fields that the rule reads; a violation shows their values.
        message: the condition, as "`thing` must be X".
        remedy: what to do, as an imperative.
        holds: whether a configuration keeps the rule.
        detail: a further clause of the sentence, such as the values that would work.
        facts: the clause that stands in the sentence instead of the fields' values.
    """

    name: str
    fields: tuple[object, ...]
    message: str
    remedy: str
    holds: Callable[[Case], bool]
    detail: Callable[[Case], str] | None = None
    facts: Callable[[Case], str] | None = None

    def violation(self, case: Case) -> str:
        """The sentence that a user reads when `case` breaks the rule."""
        if self.facts is not None:
            facts = self.facts(case)
        else:
            shown = (f"`{display_name(path)}` {say(value_at(case.config, path))}" for path in self.fields)
            facts = " and ".join(shown)
        if self.detail is not None and (detail := self.detail(case)):
            facts += f" ({detail})"
        return f"{self.message}, but {facts}; {self.remedy} [rule {self.name}]."


def rule(
    fields: tuple[object, ...],
    remedy: str,
    *,
    where: Callable[[Case], bool] | None = None,
    detail: Callable[[Case], str] | None = None,
    facts: Callable[[Case], str] | None = None,
) -> Callable[[Callable[[Case], bool]], Rule]:
    """Make a rule of a predicate: its name is the rule's name, and its docstring the rule's message.

    The arguments are the attributes of `Rule`, and `where`: the rule is about the configurations for which
    it is true, and all others keep the rule.
    """

    def of(predicate: Callable[[Case], bool]) -> Rule:
        # `python -OO` keeps no docstrings; the rule's name then says what it can.
        message = " ".join((predicate.__doc__ or predicate.__name__.replace("_", " ")).split())
        holds = predicate if where is None else lambda case: not where(case) or predicate(case)
        return Rule(predicate.__name__, fields, message, remedy, holds, detail, facts)

    return of


def conditions(rule: str, *needs: Need) -> tuple[Condition, ...]:
    """The conditions of all `needs` of a rule; ValueError at import if no configuration could meet one."""
    check_needs(rule, needs)
    return tuple(condition for need in needs for condition in need.conditions)


def unmet(conditions: Iterable[Condition], case: Case) -> str:
    """The values that break one of the conditions, as a clause; empty if all of them hold."""
    values = ((condition, value_at(case.config, condition.path)) for condition in conditions)
    return " and ".join(f"`{display_name(c.path)}` {say(value)}" for c, value in values if not c.holds(value))


def value_at(config: Config, path: Any) -> Any:
    """The value at `path`, one of `paths`."""
    return _GETTERS[path](config)


def display_name(path: Any) -> str:
    """A field's name, with its section where another section has the same name."""
    name = FIELD_BY_PATH[path].name
    return path if _NAME_COUNTS[name] > 1 else name


def say(value: object) -> str:
    """A value as a predicate: "is 3", "is on", "is not set"."""
    if value is None or value == ():
        return "is not set"
    if isinstance(value, bool):
        return "is on" if value else "is off"
    return f"is {spoken(value)}"
