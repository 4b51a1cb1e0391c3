"""The compatibility table: every cross-field rule, and the check that reports all violations at once."""

from __future__ import annotations

from collections.abc import Mapping, Set

from megazero.config.option import Section
from megazero.config.rules.acceleration import ACCELERATION_RULES, FP8_RULES, GRAPH_RULES
from megazero.config.rules.compressed import COMPRESSED_RULES
from megazero.config.rules.curriculum import CURRICULUM_RULES
from megazero.config.rules.data_sampling import DATA_SAMPLING_RULES
from megazero.config.rules.delayed import DELAYED_RULES
from megazero.config.rules.distillation import DISTILLATION_RULES
from megazero.config.rules.experts import EXPERT_RULES
from megazero.config.rules.files import DATA_RULES, OUTPUT_RULES, TOKENIZER_RULES
from megazero.config.rules.finetuning import FINETUNING_RULES
from megazero.config.rules.model import BATCH_RULES, MODEL_RULES, PARALLEL_RULES
from megazero.config.rules.optimizers import OPTIMIZER_RULES
from megazero.config.rules.pipeline import PIPELINE_RULES
from megazero.config.rules.routing import ROUTING_RULES
from megazero.config.rules.rule import Case, Rule
from megazero.config.rules.skipping import SKIPPING_RULES
from megazero.config.rules.training import (
    LENGTH_RULES,
    PRECISION_RULES,
    SCHEDULE_RULES,
)
from megazero.config.rules.upcycling import UPCYCLING_RULES
from megazero.config.rules.zero import KEPT_ACTIVATION_RULES, OFFLOAD_RULES, ZERO_RULES
from megazero.config.tree import Config

RULES: tuple[Rule, ...] = (
    *MODEL_RULES,
    *PARALLEL_RULES,
    *EXPERT_RULES,
    *ROUTING_RULES,
    *UPCYCLING_RULES,
    *BATCH_RULES,
    *PIPELINE_RULES,
    *ZERO_RULES,
    *OFFLOAD_RULES,
    *DELAYED_RULES,
    *LENGTH_RULES,
    *SCHEDULE_RULES,
    *OPTIMIZER_RULES,
    *COMPRESSED_RULES,
    *PRECISION_RULES,
    *FP8_RULES,
    *KEPT_ACTIVATION_RULES,
    *ACCELERATION_RULES,
    *GRAPH_RULES,
    *TOKENIZER_RULES,
    *DATA_RULES,
    *OUTPUT_RULES,
    *FINETUNING_RULES,
    *DISTILLATION_RULES,
    *CURRICULUM_RULES,
    *DATA_SAMPLING_RULES,
    *SKIPPING_RULES,
)


def check(config: Config, world_size: int | None, unknown_fields: Set[str] = frozenset()) -> list[str]:
    """Judge a configuration; returns all violations, as sentences.

    Args:
        config: the configuration.
        world_size: number of ranks, or None to leave out the rules that depend on it.
        unknown_fields: paths whose values are not to be trusted; rules that read one are left out.
    """
    return [
        rule.violation(Case(config, world_size)) for rule in broken_rules(config, world_size, unknown_fields)
    ]


def check_sections(sections: Mapping[str, Section]) -> list[str]:
    """The violations of the rules that read nothing but these sections, a part of a configuration."""
    case = Case(Config.model_construct(None, **sections))
    return [
        rule.violation(case)
        for rule in RULES
        if {path.partition(".")[0] for path in rule.fields + rule.reads} <= sections.keys()
        and not rule.holds(case)
    ]


def broken_rules(
    config: Config, world_size: int | None, unknown_fields: Set[str] = frozenset()
) -> list[Rule]:
    """The rules that `check` reports."""
    case = Case(config, world_size)
    return [
        rule for rule in RULES if unknown_fields.isdisjoint(rule.fields + rule.reads) and not rule.holds(case)
    ]
