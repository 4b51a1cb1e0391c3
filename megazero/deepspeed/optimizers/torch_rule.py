"""Choose the update rule on flat shards for a torch optimizer.

AdamW, Muon and each `RuleOptimizer` have rules of ours. Any other optimizer runs its own `step` on the fp32
master weights: on flat pieces if its update is elementwise, see `megazero.optim.TorchRule`, or else on whole
parameters, see `whole_rule.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from types import MappingProxyType

import torch

from megazero.deepspeed.optimizers.fused import Options, RuleOptimizer
from megazero.deepspeed.optimizers.grouped_rule import Groups, together
from megazero.deepspeed.optimizers.muon import matrix_groups, muon_of
from megazero.deepspeed.optimizers.whole_rule import keeps_shape, on_whole
from megazero.errors import ConfigError
from megazero.optim.elementwise import Adam
from megazero.optim.rule import UpdateRule
from megazero.optim.torch_rule import TorchRule, on_pieces

RuleOf = Callable[[Groups], UpdateRule]
"""Makes the rule of the groups' present options, except learning rate and weight decay."""

_PER_GROUP = ("lr", "weight_decay")


def choose_rule(optimizer: torch.optim.Optimizer) -> RuleOf:
    """Choose the rule by which an optimizer updates flat shards.

    Raises:
        ConfigError: groups differ in an option that they must share, or the optimizer can run neither on
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
    # A caller's subclass may override `step`; then it runs like any other class. torch wraps each `step`.
    own = inspect.unwrap(type(optimizer).step) is inspect.unwrap(RuleOptimizer.step)
    if isinstance(optimizer, RuleOptimizer) and own:
        return lambda groups: together([*map(optimizer.rule_of, groups)], groups, optimizer.name)
    return _run_itself(optimizer)


def _adamw(options: Options) -> Adam:
    beta1, beta2 = map(float, options["betas"])
    return Adam(beta1, beta2, options["eps"])


def _muon(groups: Groups, whole: Set[int]) -> UpdateRule:
    matrices = [group for number, group in enumerate(groups) if number in whole]
    rest = [group for number, group in enumerate(groups) if number not in whole]
    names = ("momentum", "nesterov", "ns_coefficients", "ns_steps", "adjust_lr_fn", "eps")
    own = _common(matrices, [name for name in names if name in matrices[0]], "Muon")
    return muon_of(own, _common(rest, ("betas", "eps"), "Muon's AdamW") if rest else {})


def _run_itself(optimizer: torch.optim.Optimizer) -> RuleOf:
    """The rule of a class that runs its own `step`; each group may have its own arguments."""
    kind, groups = type(optimizer), optimizer.param_groups
    accepted = inspect.signature(kind.__init__).parameters
    names = [name for name in groups[0] if name in accepted and name != "params"]
    per_group = tuple(n for n in names if n in _PER_GROUP and all(group[n] is not None for group in groups))
    shared = [name for name in names if name not in per_group]
    shapes = {tuple(param.shape) for group in groups for param in group["params"]}
    on_flat: list[TorchRule] = []
    rules = [TorchRule(kind, _options(group, shared), per_group) for group in groups]
    try:
        for rule in rules:
            known = next((other for other in on_flat if other.options == rule.options), None)
            on_flat.append(known or on_pieces(rule))
        elementwise = kind.__module__.startswith("torch.optim.") or all(
            keeps_shape(rule, shapes) for rule in on_flat
        )
    except ConfigError:
        elementwise = False
    whole = None if elementwise else on_whole(rules, shapes)

    def rule_of(groups: Groups) -> UpdateRule:
        pairs = zip(on_flat if whole is None else rules, groups, strict=True)
        current = [replace(rule, options=_options(group, shared)) for rule, group in pairs]
        if whole is None:
            return together(current, groups, kind.__name__)
        return replace(whole, rules=tuple(current))

    return rule_of


def _options(group: Options, names: Sequence[str]) -> Options:
    return MappingProxyType({name: group[name] for name in names})


def _common(groups: Groups, names: Sequence[str], kind: str) -> Options:
    """The values of options that must be the same in every group."""
    for name in names:
        values = [group[name] for group in groups]
        if any(value != values[0] for value in values):
            raise ConfigError(
                f"`{name}` must be the same in every parameter group of {kind}, but is {values}: one update "
                f"runs over matrices of all groups; only learning rate and weight decay may differ"
            )
    return _options(groups[0], names)
