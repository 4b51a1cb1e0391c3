"""Choosing the rules that slice a model: the script's, the family's, or the model's own plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from megazero.deepspeed.tensor_parallel.by_family import blocks, slice_family
from megazero.deepspeed.tensor_parallel.by_rules import slice_by_rules
from megazero.deepspeed.tensor_parallel.cutter import Cutter
from megazero.deepspeed.tensor_parallel.families import family_of, read_families, unknown_family
from megazero.deepspeed.tensor_parallel.layers import is_linear
from megazero.deepspeed.tensor_parallel.rules import (
    SlicingRule,
    SpecEntry,
    injected_rules,
    plan_rules,
    spec_rules,
)
from megazero.errors import ConfigError


@dataclass(frozen=True)
class SlicingPolicy:
    """A script's settings for slicing its model.

    Attributes:
        specs: the entries of ``partition_config.layer_specs``.
        defaults: whether layers without an entry follow the model's family; otherwise they stay whole.
        strict: whether a linear layer of a block without an entry is an error.
        preset: the `model_type` of the family to use instead of the model's own.
        injection: ``{LayerClass: names of layers whose products are summed}``.
    """

    specs: tuple[SpecEntry, ...] = ()
    defaults: bool = True
    strict: bool = False
    preset: str | None = None
    injection: Mapping[object, object] | None = None

    @classmethod
    def read(cls, section: Mapping[str, Any]) -> SlicingPolicy:
        """Read the section `tensor_parallel` of a JSON.

        Raises:
            ConfigError: a key or a value is unknown.
        """
        config = section.get("partition_config") or {}
        known = {"use_default_specs", "strict_mode", "layer_specs"}
        if unknown := sorted(set(config) - known):
            raise ConfigError(
                f"`partition_config` must have the keys {', '.join(sorted(known))}, but has {unknown[0]}; "
                "leave it out"
            )
        preset = section.get("preset_model")
        types = {kind for family in read_families() for kind in family.types}
        if preset is not None and preset not in types:
            raise ConfigError(
                f"`preset_model` must be one of {', '.join(sorted(types))}, but is {preset}; give "
                "`partition_config` instead"
            )
        return cls(
            tuple(SpecEntry.read(entry) for entry in config.get("layer_specs") or ()),
            bool(config.get("use_default_specs", True)),
            bool(config.get("strict_mode", False)),
            preset,
        )


def slice_model(cutter: Cutter, policy: SlicingPolicy) -> None:
    """Slice a model over the cutter's ranks; with one rank, do nothing.

    The rules are, by precedence, those of ``layer_specs``, of the model's family, of `injection`, and of the
    model's own `tp_plan`. The family comes before the latter two because they cannot describe heads and the
    layout of fused weights.

    Raises:
        ConfigError: the model has no rules, or a layer contradicts its rule.
    """
    model = cutter.model
    if cutter.group.size == 1:
        return
    config = getattr(model, "config", None)
    kind = getattr(config, "model_type", None)
    rules: dict[str, SlicingRule] = dict(spec_rules(model, policy.specs, kind))
    if policy.specs and not rules:
        raise ConfigError(
            "`layer_specs` must match weights of `model`, but match none; a pattern matches from the "
            "start of names such as " + next(f"{p}.weight" for p, m in model.named_modules() if is_linear(m))
        )
    if policy.specs and policy.strict:
        _check_all(model, rules)
    families = {kind: family for family in read_families() for kind in family.types}
    family = families[policy.preset] if policy.preset else family_of(config)
    if rules and (not policy.defaults or family is None):
        slice_by_rules(cutter, rules)
    elif family is not None:
        slice_family(cutter, family, rules)
    elif policy.injection:
        slice_by_rules(cutter, injected_rules(model, policy.injection))
    elif plan := getattr(model, "tp_plan", None):
        slice_by_rules(cutter, plan_rules(model, plan))
    else:
        raise unknown_family(model)


def _check_all(model: nn.Module, rules: Mapping[str, SlicingRule]) -> None:
    for path, block in blocks(model):
        for name, module in block.named_modules():
            if is_linear(module) and f"{path}.{name}" not in rules:
                raise ConfigError(
                    f"`layer_specs` must name every linear layer of a block in strict mode, but not "
                    f"`{path}.{name}`; add an entry for it, with `partition_type` skip to leave it whole"
                )
