"""Torch optimizers with DeepSpeed's names and our update rules, for `megazero.initialize` or alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import nn

from megazero.errors import ConfigError
from megazero.optim.compressed.onebit_adam import OnebitAdam
from megazero.optim.compressed.onebit_lamb import OnebitLamb
from megazero.optim.compressed.zero_one_adam import ZeroOneAdam, ZeroOneSteps
from megazero.optim.elementwise import Lion
from megazero.optim.lamb import Lamb
from megazero.optim.rule import Pieces, UpdateRule, is_matrix_rule, is_norm_rule, is_reducing_rule

Params = Iterable[nn.Parameter] | Iterable[dict[str, Any]]
"""Parameters, or parameter groups."""
ParamGroups = Sequence[nn.Parameter] | Sequence[dict[str, Any]]
"""Parameters, or parameter groups, that can be read more than once."""
Options = Mapping[str, Any]
"""The options of a parameter group, by name."""


class RuleOptimizer(torch.optim.Optimizer, ABC):
    """A torch optimizer that updates by a rule of ours, which the options of each group describe.

    `megazero.initialize` takes its groups and options, and runs the rule on shards. By itself it updates the
    parameters of one process, with state and arithmetic in fp32.

    Attributes:
        name: its name in messages.
    """

    name: str

    @abstractmethod
    def rule_of(self, group: Options) -> UpdateRule:
        """The update rule for the options of a group."""

    @torch.no_grad()
    def step(self, closure: Callable[[], object] | None = None) -> Any:
        """Update every parameter that has a gradient; returns the closure's result, if there is one.

        Raises:
            ConfigError: the rule communicates between replicas.
        """
        if is_reducing_rule(self.rule_of(self.param_groups[0])):
            raise ConfigError(
                f"`step` of {self.name} must be called on the optimizer that `megazero.initialize` returns, "
                "because it communicates between replicas"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            rule = self.rule_of(group)
            for param in (param for param in group["params"] if param.grad is not None):
                wide = param.float().contiguous()
                state = self.state[param]
                for name, start in rule.init_state(wide).items() if not state else ():
                    state[name] = start
                state["step"] = state.get("step", 0) + 1
                moments = {name: state[name] for name in rule.state_names}
                grad = param.grad.float().contiguous()
                pieces = Pieces([wide], [grad], [moments], [group["weight_decay"]], state["step"])
                rule.step(pieces, float(group["lr"]), **_arguments(rule, pieces))
                if wide is not param:
                    param.copy_(wide)
        return loss


def _arguments(rule: UpdateRule, pieces: Pieces) -> dict[str, Any]:
    """The further arguments of a rule's `step`, for one whole parameter."""
    if is_norm_rule(rule):
        (measured,) = rule.prepare(pieces)
        return {"norms": [torch.stack(list(measured))], "exempt": [pieces.weight_decays[0] == 0]}
    if is_matrix_rule(rule):
        (prepared,) = rule.prepare(pieces)
        return {"updates": [rule.change(prepared.clone()[None])[0]]}
    return {}


class FusedLion(RuleOptimizer):
    """DeepSpeed's FusedLion (Chen et al. 2023): see `megazero.optim.elementwise.Lion`.

    Args:
        params: parameters or parameter groups.
        lr: learning rate.
        betas: weight of the momentum in the update, and decay of the momentum; (0.9, 0.99) in the paper.
        weight_decay: decoupled weight decay; groups may have their own.
        set_grad_none: has no effect; `zero_grad` has an argument for it.
    """

    name = "FusedLion"

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def rule_of(self, group: Options) -> Lion:
        return Lion(*map(float, group["betas"]))


@dataclass
class _Ratios:
    """The trust ratios of the latest step, in the order in which they were computed."""

    step: int = 0
    values: list[torch.Tensor] = field(default_factory=list)


class _RecordingLamb(Lamb):
    """A `Lamb` that records the trust ratios of the latest step."""

    record: _Ratios

    def __init__(self, rule: Lamb, record: _Ratios):
        super().__init__(**vars(rule))
        object.__setattr__(self, "record", record)

    def step(self, pieces: Pieces, lr: float, norms: Sequence[torch.Tensor], exempt: Sequence[bool]) -> None:
        if self.record.step != pieces.step:
            self.record.step, self.record.values = pieces.step, []
        super().step(pieces, lr, norms, exempt)

    def ratios(self, norms: Sequence[torch.Tensor], exempt: Sequence[bool]) -> torch.Tensor:
        values = super().ratios(norms, exempt)
        self.record.values.append(values)
        return values


class FusedLamb(RuleOptimizer):
    """DeepSpeed's FusedLamb (You et al. 2020): see `megazero.optim.Lamb`.

    In `megazero.initialize`, norms are of whole parameters, whether or not they are sharded.

    Args:
        params: parameters or parameter groups.
        lr: learning rate.
        bias_correction: whether the bias of the moments corrects the learning rate.
        betas: decays of the moments.
        eps: added to the root of the second moment.
        eps_inside_sqrt: must be false.
        weight_decay: weight decay, added to the update; groups may have their own.
        max_grad_norm: must be 0, because the engine clips.
        max_coeff, min_coeff: bounds of the trust ratio.
        amsgrad: must be false.
        use_nvlamb: apex's option, always on in DeepSpeed; false sets the trust ratio of groups without weight
            decay to 1.

    Raises:
        ConfigError: an unsupported variant is on, or the bounds are out of order.
    """

    name = "FusedLamb"

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
        use_nvlamb: bool = True,
    ):
        variants = {"eps_inside_sqrt": eps_inside_sqrt, "amsgrad": amsgrad, "max_grad_norm": max_grad_norm}
        if on := [name for name, value in variants.items() if value]:
            raise ConfigError(f"`{', '.join(on)}` must be off for FusedLamb; leave it out")
        if not 0 <= min_coeff <= max_coeff:
            raise ConfigError(
                "`min_coeff` must be at least 0 and at most `max_coeff`, but they are "
                f"{min_coeff} and {max_coeff}; change one of them"
            )
        own = {"bias_correction": bias_correction, "max_coeff": max_coeff, "min_coeff": min_coeff}
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, **own}
        super().__init__(params, {**options, "use_nvlamb": use_nvlamb})
        self._ratios = _Ratios()

    def rule_of(self, group: Options) -> Lamb:
        return _RecordingLamb(_lamb_of(group), self._ratios)

    def get_lamb_coeffs(self) -> list[float]:
        """The trust ratios of the last update, one for each parameter that this rank has a slice of."""
        return [float(value) for ratios in self._ratios.values for value in ratios]


Kind = Literal["onebit-adam", "zero-one-adam", "onebit-lamb"]
_MOMENTS: Options = MappingProxyType({"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0})
_STEPS: Mapping[str, int] = MappingProxyType(
    {
        "var_freeze_step": 100_000,
        "var_update_scaler": 16,
        "local_step_scaler": 32_678,
        "local_step_clipper": 16,
    }
)
_FACTORS: Mapping[str, float] = MappingProxyType(
    {"coeff_beta": 0.9, "factor_min": 0.5, "factor_max": 4.0, "factor_threshold": 0.1}
)
_LAMB: Options = MappingProxyType(
    {"bias_correction": True, "max_coeff": 10.0, "min_coeff": 0.01, "use_nvlamb": True}
)
COMPRESSED: Mapping[Kind, Options] = MappingProxyType(
    {
        "onebit-adam": {**_MOMENTS, "freeze_step": 100_000, "bias_correction": True},
        "zero-one-adam": {**_MOMENTS, **_STEPS, "bias_correction": True},
        "onebit-lamb": {**_MOMENTS, "freeze_step": 100_000, **_LAMB, **_FACTORS},
    }
)
"""The options of each kind and their defaults; all groups have the same values."""
_OWN_WAY = "elements without gradients are left out anyway, and all parameters are frozen alike; leave it out"


class CompressedOptimizer(RuleOptimizer):
    """1-bit Adam, 0/1 Adam or 1-bit LAMB for `megazero.initialize`, chosen by a JSON's `optimizer.type`.

    Args:
        kind: the value of `--optimizer`.
        params: parameters or parameter groups.
        lr: learning rate.
        options: further options, by DeepSpeed's names.

    Raises:
        ConfigError: options contradict each other, or a group has an option that is not supported.
    """

    def __init__(self, kind: Kind, params: Params, lr: float = 1e-3, **options: object):
        super().__init__(params, {"lr": lr, **COMPRESSED[kind], **options})
        self.name = kind
        for name in ("exp_avg_mask", "non_freeze"):
            if any(name in group for group in self.param_groups):
                raise ConfigError(f"`{name}` must not be an option of a parameter group, but is: {_OWN_WAY}")
        self.rule_of(self.param_groups[0])

    def rule_of(self, group: Options) -> UpdateRule:
        if self.name == "zero-one-adam":
            steps = ZeroOneSteps(**{name: group[name] for name in _STEPS})
            return ZeroOneAdam(steps, **_adam(group), corrects=group["bias_correction"])
        if self.name == "onebit-adam":
            return OnebitAdam(group["freeze_step"], **_adam(group), corrects=group["bias_correction"])
        factors = {name: group[name] for name in _FACTORS}
        return OnebitLamb(group["freeze_step"], _lamb_of(group), **factors)


def _adam(group: Options) -> dict[str, Any]:
    beta1, beta2 = group["betas"]
    return {"beta1": float(beta1), "beta2": float(beta2), "eps": group["eps"]}


def _lamb_of(group: Options) -> Lamb:
    return Lamb(
        **_adam(group),
        min_coeff=group["min_coeff"],
        max_coeff=group["max_coeff"],
        bias_correction="rate" if group["bias_correction"] else "none",
        adapt_all=group["use_nvlamb"],
    )
