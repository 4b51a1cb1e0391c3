"""Turns a torch optimizer into an update rule on flat shards.

AdamW, Muon and each `RuleOptimizer` have rules of their own. Any other optimizer runs itself on the fp32
master weights: on flat pieces if it moves each element by itself, see `megazero.optim.TorchRule`, and else on
whole parameters, see `whole_rule.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch

from megazero.deepspeed.optimizers.fused import RuleOptimizer
from megazero.deepspeed.optimizers.grouped_rule import Groups, together
from megazero.deepspeed.optimizers.muon import matrix_groups, muon_of
from megazero.deepspeed.optimizers.whole_rule import keeps_shape, on_whole
from megazero.errors import ConfigError
from megazero.optim.elementwise import Adam
from megazero.optim.rule import UpdateRule
from megazero.optim.torch_rule import TorchRule, on_pieces

RuleOf = Callable[[Groups], UpdateRule]
"""Makes the rule from the groups' current options; learning rate and weight decay are passed separately."""

_PER_GROUP = ("lr", "weight_decay")


def choose_rule(optimizer: torch.optim.Optimizer) -> RuleOf:
    """The rule by which `optimizer` updates flat shards.

    Args:
        optimizer: its class and the options of its groups determine the rule.

    Raises:
        ConfigError: the groups differ in options that must be the same, or the optimizer can run neither on
            flat pieces nor on whole parameters.
    """
    name = type(optimizer).__name__
    plain_adamw = type(optimizer) is torch.optim.AdamW and not any(
        group.get("amsgrad") or group.get("maximize") for group in optimizer.param_groups
    )
    if plain_adamw:
        return lambda groups: together([_adamw(group) for group in groups], groups, name)
    if whole := matrix_groups(optimizer):
        return lambda groups: _muon(groups, whole)
    # A caller's subclass may have another `step`, and is run as any other class. torch wraps that of each.
    own = inspect.unwrap(type(optimizer).step) is inspect.unwrap(RuleOptimizer.step)
    if isinstance(optimizer, RuleOptimizer) and own:
        return lambda groups: together([*map(optimizer.rule_of, groups)], groups, optimizer.name)
    return _of_itself(optimizer)


def _adamw(options: Mapping[str, Any]) -> Adam:
    beta1, beta2 = map(float, options["betas"])
    return Adam(beta1, beta2, options["eps"])


def _muon(groups: Groups, whole: Set[int]) -> UpdateRule:
    matrices = [group for number, group in enumerate(groups) if number in whole]
    rest = [group for number, group in enumerate(groups) if number not in whole]
    names = ("momentum", "nesterov", "ns_coefficients", "ns_steps", "adjust_lr_fn", "eps")
    own = _common(matrices, [name for name in names if name in matrices[0]], "Muon")
    return muon_of(own, _common(rest, ("betas", "eps"), "Muon's AdamW") if rest else {})


def _of_itself(optimizer: torch.optim.Optimizer) -> RuleOf:
    """The rule of a class that runs itself; each group may have its own arguments."""
    kind, groups = type(optimizer), optimizer.param_groups
    accepted = inspect.signature(kind.__init__).parameters
    names = [name for name in groups[0] if name in accepted and name != "params"]
    takes = tuple(n for n in names if n in _PER_GROUP and all(group[n] is not None for group in groups))
    shared = [name for name in names if name not in takes]
    shapes = {tuple(param.shape) for group in groups for param in group["params"]}
    tried: list[TorchRule] = []
    asked = [TorchRule(kind, _options(group, shared), takes) for group in groups]
    try:
        for rule in asked:
            known = next((other for other in tried if other.options == rule.options), None)
            tried.append(known or on_pieces(rule))
        by_elements = kind.__module__.startswith("torch.optim.") or all(
            keeps_shape(rule, shapes) for rule in tried
        )
    except ConfigError:
        by_elements = False
    whole = None if by_elements else on_whole(asked, shapes)

    def rule_of(groups: Groups) -> UpdateRule:
        pairs = zip(tried if whole is None else asked, groups, strict=True)
        now = [replace(rule, options=_options(group, shared)) for rule, group in pairs]
        return together(now, groups, kind.__name__) if whole is None else replace(whole, rules=tuple(now))

    return rule_of


def _options(group: Mapping[str, Any], names: Sequence[str]) -> Mapping[str, Any]:
    return MappingProxyType({name: group[name] for name in names})


def _common(groups: Groups, names: Sequence[str], kind: str) -> Mapping[str, Any]:
    """The values of these options, which must be the same in every group."""
    for name in names:
        values = [group[name] for group in groups]
        if any(value != values[0] for value in values):
            raise ConfigError(
                f"`{name}` must be the same in every parameter group of {kind}, but is {values}: one update "
                f"runs over matrices of all groups; only learning rate and weight decay may differ"
            )
    return _options(groups[0], names)
