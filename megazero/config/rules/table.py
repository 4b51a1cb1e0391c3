"""The compatibility table: every cross-field rule, and the check that reports all violations at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set

from megazero.config.fields import SECTIONS
from megazero.config.heterogeneous.rules import HETEROGENEOUS_RULES
from megazero.config.hybrid.rules import HYBRID_RULES
from megazero.config.rules.attention import ATTENTION_RULES, SPARSE_RULES
from megazero.config.rules.context import CONTEXT_RULES
from megazero.config.rules.curriculum import CURRICULUM_RULES
from megazero.config.rules.data import DATA_RULES, FINETUNING_RULES
from megazero.config.rules.data_sampling import DATA_SAMPLING_RULES
from megazero.config.rules.experts import EXPERT_RULES, UPCYCLING_RULES
from megazero.config.rules.model import BATCH_RULES, MODEL_RULES, PARALLEL_RULES
from megazero.config.rules.needs import unmet_needs
from megazero.config.rules.pipeline import PIPELINE_RULES
from megazero.config.rules.routing import ROUTING_RULES
from megazero.config.rules.rule import Case, Rule
from megazero.config.rules.skipping import SKIPPING_RULES
from megazero.config.rules.sound import Unsound, sound_part
from megazero.config.rules.training import LENGTH_RULES, OPTIMIZER_RULES, PRECISION_RULES, SCHEDULE_RULES
from megazero.config.rules.zero import OFFLOAD_RULES, ZERO_RULES
from megazero.config.t5.rules import ENCODER_DECODER_RULES
from megazero.config.tree.config import Config
from megazero.config.tree.option import Section

RULES: tuple[Rule, ...] = (
    *MODEL_RULES,
    *ATTENTION_RULES,
    *HETEROGENEOUS_RULES,
    *HYBRID_RULES,
    *PARALLEL_RULES,
    *CONTEXT_RULES,
    *EXPERT_RULES,
    *ROUTING_RULES,
    *UPCYCLING_RULES,
    *BATCH_RULES,
    *PIPELINE_RULES,
    *ZERO_RULES,
    *OFFLOAD_RULES,
    *LENGTH_RULES,
    *SCHEDULE_RULES,
    *OPTIMIZER_RULES,
    *PRECISION_RULES,
    *DATA_RULES,
    *FINETUNING_RULES,
    *CURRICULUM_RULES,
    *DATA_SAMPLING_RULES,
    *SKIPPING_RULES,
    *SPARSE_RULES,
    *ENCODER_DECODER_RULES,
)


def check(config: Config, world_size: int | None, unknown_fields: Set[str] = frozenset()) -> list[str]:
    """Judge a configuration; returns all violations, as sentences.

    Args:
        config: the configuration.
        world_size: number of ranks, or None to leave out the rules that depend on it.
        unknown_fields: paths whose values are not to be trusted; rules that read one are left out.
    """
    return [sentence for _, sentence in _violations(_case(config, world_size, unknown_fields))]


def check_sections(sections: Mapping[str, Section]) -> list[str]:
    """The violations of the rules that read nothing but these sections, a part of a configuration."""
    return [sentence for _, sentence in _violations(Case(sound_part(sections)))]


def broken_rules(config: Config, world_size: int | None, unknown_fields: Set[str] = frozenset()) -> list[str]:
    """The names of the rules whose violations `check` reports."""
    return [name for name, _ in _violations(_case(config, world_size, unknown_fields))]


def _case(config: Config, world_size: int | None, unknown_fields: Set[str]) -> Case:
    if unknown_fields:
        config = sound_part({name: getattr(config, name) for name in SECTIONS}, unknown_fields)
    return Case(config, world_size)


def _violations(case: Case) -> Iterator[tuple[str, str]]:
    """The names of broken rules, and the sentences on them; rules on what is not known are left out."""
    yield from unmet_needs(case.config)
    for rule in RULES:
        try:
            if not rule.holds(case):
                yield rule.name, rule.violation(case)
        except Unsound:
            continue
