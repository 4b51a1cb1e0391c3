"""Turns a torch optimizer into an update rule on flat shards.

AdamW and FusedLamb have rules of their own. Any other optimizer runs itself, on flat pieces of the fp32
master weights: the result is the same if each element's update depends on that element alone, which is tested
beforehand.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from megazero.deepspeed.compressed import OPTIONS, CompressedOptimizer
from megazero.deepspeed.lamb import FusedLamb, lamb_of
from megazero.errors import ConfigError
from megazero.optim import Adam, Needs, UpdateRule

Groups = Sequence[Mapping[str, Any]]
"""Parameter groups of a torch optimizer."""

RuleOf = Callable[[Groups], UpdateRule]
"""Makes the rule from the groups' current options; learning rate and weight decay are passed separately."""

_PER_GROUP = ("lr", "weight_decay")
_TRIAL_STEPS = 3


@dataclass(frozen=True)
class TorchRule:
    """A torch optimizer class as an update rule (see `UpdateRule`).

    Attributes:
        kind: the class.
        options: its arguments except learning rate and weight decay.
        takes: which of these two it takes.
        state_names: its state tensors with the parameter's shape.
        counter: how it counts its updates: the entry `step` as a tensor, as a number, or not at all.
    """

    needs: ClassVar[Needs] = Needs()

    kind: type[torch.optim.Optimizer]
    options: Mapping[str, Any]
    takes: tuple[str, ...]
    state_names: tuple[str, ...] = ()
    counter: type | None = None

    def init_state(self, like: Tensor) -> dict[str, Tensor]:
        """Zeros, which the first update replaces with the optimizer's own initial state."""
        return {
            name: torch.zeros_like(like, memory_format=torch.contiguous_format) for name in self.state_names
        }

    def step(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        states: Sequence[dict[str, Tensor]],
        *,
        step: int,
        lr: float,
        weight_decays: Sequence[float],
    ) -> None:
        """Update `params` and `states` in place, as the class does."""
        for decay in dict.fromkeys(weight_decays):
            chosen = [i for i, other in enumerate(weight_decays) if other == decay]
            leaves = [nn.Parameter(params[i]) for i in chosen]
            optimizer = self.make(leaves, lr, decay)
            for leaf, i in zip(leaves, chosen, strict=True):
                leaf.grad = grads[i]
                if step > 1:
                    optimizer.state[leaf] = {**states[i], **self._count(step - 1)}
            optimizer.step()
            for leaf, i in zip(leaves, chosen, strict=True):
                for name, mine in states[i].items():
                    if optimizer.state[leaf][name] is not mine:
                        mine.copy_(optimizer.state[leaf][name])

    def make(self, leaves: Sequence[nn.Parameter], lr: float, weight_decay: float) -> torch.optim.Optimizer:
        """An optimizer for these parameters, without state."""
        mine = {"lr": lr, "weight_decay": weight_decay}
        return self.kind(leaves, **self.options, **{name: mine[name] for name in self.takes})

    def _count(self, done: int) -> dict[str, Any]:
        if self.counter is None:
            return {}
        return {"step": torch.tensor(float(done)) if self.counter is Tensor else done}


def choose_rule(optimizer: torch.optim.Optimizer, *, allow_untested: bool) -> RuleOf:
    """The rule by which `optimizer` updates flat shards.

    Args:
        optimizer: its class and the options of its groups determine the rule.
        allow_untested: also accept one whose update of an element depends on others; it then sees flat pieces
            of tensors, so its results depend on the layout.

    Raises:
        ConfigError: the groups differ in more than learning rate and weight decay, or the optimizer cannot
            run on flat pieces.
    """
    plain_adamw = type(optimizer) is torch.optim.AdamW and not any(
        group.get("amsgrad") or group.get("maximize") for group in optimizer.param_groups
    )
    if plain_adamw:
        return _adamw
    if type(optimizer) is FusedLamb:
        return _lamb
    if isinstance(optimizer, CompressedOptimizer):
        return partial(_compressed, optimizer)
    rule = _try_out(TorchRule(type(optimizer), *_options(optimizer)), allow_untested=allow_untested)
    return lambda groups: replace(rule, options=_common(groups, tuple(rule.options), rule.kind.__name__))


def _adamw(groups: Groups) -> UpdateRule:
    found = _common(groups, ("betas", "eps"), "AdamW")
    return Adam(float(found["betas"][0]), float(found["betas"][1]), found["eps"])


def _lamb(groups: Groups) -> UpdateRule:
    names = ("betas", "eps", "min_coeff", "max_coeff", "bias_correction", "use_nvlamb")
    return lamb_of(_common(groups, names, "FusedLamb"))


def _compressed(optimizer: CompressedOptimizer, groups: Groups) -> UpdateRule:
    names = ("betas", "eps", *OPTIONS[optimizer.kind])
    return optimizer.rule_of(_common(groups, names, optimizer.kind))


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


def _try_out(rule: TorchRule, *, allow_untested: bool) -> TorchRule:
    """The rule with its state described, after trial updates of a small tensor in one piece and in two.

    Raises:
        ConfigError: the two disagree, or the optimizer fails.
    """
    name = rule.kind.__name__
    generator = torch.Generator().manual_seed(0)
    start, *grads = torch.randn(1 + _TRIAL_STEPS, 4, 6, generator=generator).unbind()
    whole = nn.Parameter(start.clone())
    optimizer = rule.make([whole], 0.1, 0.01)
    try:
        for grad in grads:
            whole.grad = grad.clone()
            optimizer.step()
        rule = _described(rule, optimizer.state[whole], whole)
        pieces = [piece.clone() for piece in start.view(-1).split([9, 15])]
        states = [rule.init_state(piece) for piece in pieces]
        for number, grad in enumerate(grads, start=1):
            parts = [part.clone() for part in grad.reshape(-1).split([9, 15])]
            rule.step(pieces, parts, states, step=number, lr=0.1, weight_decays=[0.01, 0.01])
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"`optimizer` must be one that can update flat pieces of tensors, but {name} fails there "
            f"({type(error).__name__}: {error}); choose another, such as torch.optim.AdamW"
        ) from error
    if not allow_untested and not torch.allclose(torch.cat(pieces), whole.detach().view(-1)):
        raise ConfigError(
            f"`optimizer` must update each element by itself to run on shards, but {name} gives other values "
            'for a tensor in pieces; choose another, or set "zero_allow_untested_optimizer" to true to take '
            "values that depend on the layout"
        )
    return rule


def _described(rule: TorchRule, state: Mapping[str, Any], param: Tensor) -> TorchRule:
    """The rule with the names of the state that a parameter has after an update."""
    counter = state.get("step")
    shaped = {
        name for name, value in state.items() if isinstance(value, Tensor) and value.shape == param.shape
    }
    others = [name for name, value in state.items() if name not in shaped | {"step"} and value is not None]
    if others or (counter is not None and not isinstance(counter, (Tensor, int, float))):
        raise ConfigError(
            f"`optimizer` must only keep tensors of the parameter's shape and a count of its steps, but "
            f"{rule.kind.__name__} keeps {', '.join(others) or 'another count'}; choose another"
        )
    kind = None if counter is None else Tensor if isinstance(counter, Tensor) else int
    return replace(rule, state_names=tuple(name for name in state if name in shaped), counter=kind)
