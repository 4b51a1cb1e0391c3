"""The compatibility table: every cross-field rule, and the check that reports all violations at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set

from megazero.config.fields import SECTIONS
from megazero.config.heterogeneous import rules as heterogeneous
from megazero.config.hybrid import rules as hybrid
from megazero.config.policy import rules as policy
from megazero.config.preference import rules as preference
from megazero.config.rules import (
    attention,
    context,
    curriculum,
    data,
    data_sampling,
    experts,
    model,
    pipeline,
    places,
    routing,
    skipping,
    training,
    zero,
)
from megazero.config.rules.needs import unmet_needs
from megazero.config.rules.rule import Case, Rule
from megazero.config.rules.sound import Unsound, sound_part
from megazero.config.t5 import rules as t5
from megazero.config.tree.config import Config
from megazero.config.tree.option import Section

_MODEL = (model, attention, heterogeneous, hybrid, t5, experts, routing)
_STEP = (context, pipeline, zero, training, data, curriculum, data_sampling, skipping, places)
_AFTER = (preference, policy)

RULES: tuple[Rule, ...] = tuple(
    rule for module in (*_MODEL, *_STEP, *_AFTER) for rule in vars(module).values() if isinstance(rule, Rule)
)
"""Every rule, by module and in the order in which they are written."""


def check(config: Config, world_size: int | None, unknown_fields: Set[str] = frozenset()) -> list[str]:
    """Judge a configuration, and return all violations as sentences.

    Args:
        config: the configuration.
        world_size: number of ranks, or None to leave out the rules that depend on it.
        unknown_fields: paths of fields that could not be read; rules that read one of them are left out.
    """
    return [sentence for _, sentence in _violations(_case(config, world_size, unknown_fields))]


def check_sections(sections: Mapping[str, Section]) -> list[str]:
    """The violations of the rules that read these sections alone."""
    return [sentence for _, sentence in _violations(Case(sound_part(sections)))]


def broken_rules(config: Config, world_size: int | None, unknown_fields: Set[str] = frozenset()) -> list[str]:
    """The names of the rules whose violations `check` reports."""
    return [name for name, _ in _violations(_case(config, world_size, unknown_fields))]


def _case(config: Config, world_size: int | None, unknown_fields: Set[str]) -> Case:
    if unknown_fields:
        config = sound_part({name: getattr(config, name) for name in SECTIONS}, unknown_fields)
    return Case(config, world_size)


def _violations(case: Case) -> Iterator[tuple[str, str]]:
    """Yield the name and the sentence of each broken rule; a rule that reads an unknown field is left out."""
    yield from unmet_needs(case.config)
    for rule in RULES:
        try:
            if not rule.holds(case):
                yield rule.name, rule.violation(case)
        except Unsound:
            continue
