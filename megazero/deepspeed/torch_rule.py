"""Turns a torch optimizer into an update rule on flat shards.

AdamW, Muon and each `RuleOptimizer` have rules of their own. Any other optimizer runs itself on flat pieces
of the fp32 master weights, see `megazero.optim.TorchRule`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch

from megazero.deepspeed.fused import FUSED, CompressedOptimizer, RuleOptimizer
from megazero.deepspeed.muon import matrix_groups, muon_of
from megazero.errors import ConfigError
from megazero.optim.elementwise import Adam
from megazero.optim.rule import UpdateRule
from megazero.optim.torch_rule import TorchRule, on_pieces

Groups = Sequence[Mapping[str, Any]]
"""Parameter groups of a torch optimizer."""

RuleOf = Callable[[Groups], UpdateRule]
"""Makes the rule from the groups' current options; learning rate and weight decay are passed separately."""

_PER_GROUP = ("lr", "weight_decay")


def choose_rule(optimizer: torch.optim.Optimizer, *, allow_untested: bool) -> RuleOf:
    """The rule by which `optimizer` updates flat shards.

    Args:
        optimizer: its class and the options of its groups determine the rule.
        allow_untested: also accept an optimizer whose update of an element depends on others; it then sees
            flat pieces of tensors, so its results depend on the layout.

    Raises:
        ConfigError: the groups differ in more than learning rate and weight decay, or the optimizer cannot
            run on flat pieces.
    """
    plain_adamw = type(optimizer) is torch.optim.AdamW and not any(
        group.get("amsgrad") or group.get("maximize") for group in optimizer.param_groups
    )
    if plain_adamw:
        return _adamw
    # A caller's subclass may have another `step`, and is run as any other class.
    if isinstance(optimizer, RuleOptimizer) and type(optimizer) in (CompressedOptimizer, *FUSED.values()):
        return lambda groups: optimizer.rule_of(_common(groups, optimizer.shared, optimizer.name))
    if whole := matrix_groups(optimizer):
        return lambda groups: _muon(groups, whole)
    rule = on_pieces(TorchRule(type(optimizer), *_options(optimizer)), allow_untested=allow_untested)
    return lambda groups: replace(rule, options=_common(groups, tuple(rule.options), rule.kind.__name__))


def _adamw(groups: Groups) -> UpdateRule:
    options = _common(groups, ("betas", "eps"), "AdamW")
    return Adam(float(options["betas"][0]), float(options["betas"][1]), options["eps"])


def _muon(groups: Groups, whole: Set[int]) -> UpdateRule:
    matrices = [group for number, group in enumerate(groups) if number in whole]
    rest = [group for number, group in enumerate(groups) if number not in whole]
    names = ("momentum", "nesterov", "ns_coefficients", "ns_steps", "adjust_lr_fn", "eps")
    own = _common(matrices, [name for name in names if name in matrices[0]], "Muon")
    return muon_of(own, _common(rest, ("betas", "eps"), "Muon's AdamW") if rest else {})


def _options(optimizer: torch.optim.Optimizer) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """The arguments of the optimizer's class that its groups hold, and which of them are per group."""
    accepted = inspect.signature(type(optimizer).__init__).parameters
    names = [name for name in optimizer.param_groups[0] if name in accepted and name != "params"]
    shared = tuple(name for name in names if name not in _PER_GROUP)
    common = _common(optimizer.param_groups, shared, type(optimizer).__name__)
    return common, tuple(name for name in names if name in _PER_GROUP)


def _common(groups: Groups, names: Sequence[str], kind: str) -> Mapping[str, Any]:
    """The values of these options, which must be the same in every group."""
    for name in names:
        values = [group[name] for group in groups]
        if any(value != values[0] for value in values):
            raise ConfigError(
                f"`{name}` must be the same in every parameter group of {kind}, but is {values}: one update "
                f"runs over buckets of all groups; only learning rate and weight decay may differ"
            )
    return MappingProxyType({name: groups[0][name] for name in names})
