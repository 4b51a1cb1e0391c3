"""The parts of a cross-field rule: a row of facts, a predicate, and the sentence of a violation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
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

MOST_INCREMENTS = 100_000
"""The most increments of a batch-size ramp: each is a segment of the training that is judged by itself."""

_NAME_COUNTS = MappingProxyType(Counter(spec.name for spec in FIELDS))

_GETTERS = MappingProxyType({spec.path: attrgetter(spec.path) for spec in FIELDS})


@dataclass(frozen=True)
class Case:
    """The configuration that a rule judges and, where known, the number of ranks that it is to run on."""

    config: Config
    world_size: int | None = None

    @property
    def data_parallel(self) -> int | None:
        """Replicas of the model; None while the world size is unknown or does not factor."""
        ranks = model_ranks(self.config)
        if self.world_size is None or self.world_size % ranks:
            return None
        return self.world_size // ranks

    @cached_property
    def steps(self) -> Steps | None:
        """The steps of the training; None if replicas or the ramp's end are unknown, or rows are none."""
        batch = self.config.batch
        if self.data_parallel is None or (batch.rampup_batch_size and batch.global_batch_size is None):
            return None
        if BatchRamp.of(batch, self.config.model, self.data_parallel).increments > MOST_INCREMENTS:
            return None
        steps = Steps.of(self.config, self.data_parallel)
        # A curriculum may cut samples into rows that are longer than they are, which a rule refuses.
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
        name: what the rule is called in messages, docs and tests.
        fields: the `paths` of the fields that the rule is about; a violation shows their values.
        message: what must hold, as "`thing` must be X".
        remedy: what to do, as an imperative.
        holds: whether a configuration keeps the rule.
        detail: a further clause for the message, such as the values that would work.
        in_detail: whether `detail` says what there is to say about the values of the fields.
    """

    name: str
    fields: tuple[Any, ...]
    message: str
    remedy: str
    holds: Callable[[Case], bool]
    detail: Callable[[Case], str] | None = None
    in_detail: bool = False

    def violation(self, case: Case) -> str:
        """The sentence that a user reads when `case` breaks the rule."""
        paths = () if self.in_detail else self.fields
        shown = [f"`{display_name(path)}` {say(value_at(case.config, path))}" for path in paths]
        values = " and ".join(shown)
        detail = self.detail(case) if self.detail else ""
        facts = f"{values} ({detail})" if values and detail else values or detail
        return f"{self.message}, but {facts}; {self.remedy} [rule {self.name}]."


def conditions(rule: str, *needs: Need) -> tuple[Condition, ...]:
    """The conditions of a rule that several fields must meet; refused at once if no run could meet one."""
    check_needs(rule, needs)
    return tuple(condition for need in needs for condition in need.conditions)


def value_at(config: Config, path: Any) -> Any:
    """The value at `path`, one of `paths`."""
    return _GETTERS[path](config)


def display_name(path: Any) -> str:
    """A field's name, with its section where another section has the same name."""
    name = FIELD_BY_PATH[path].name
    return path if _NAME_COUNTS[name] > 1 else name


def say(value: Any) -> str:
    """A value as a predicate: "is 3", "is on", "is not set"."""
    if value is None or value == ():
        return "is not set"
    if isinstance(value, bool):
        return "is on" if value else "is off"
    return f"is {spoken(value)}"
