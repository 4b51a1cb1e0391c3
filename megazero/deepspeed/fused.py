"""Our rules under DeepSpeed's names, as torch optimizers: for `megazero.initialize`, or by themselves."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from megazero.errors import ConfigError
from megazero.optim.compressed.onebit_adam import OnebitAdam
from megazero.optim.compressed.onebit_lamb import OnebitLamb
from megazero.optim.compressed.zero_one_adam import ZeroOneAdam
from megazero.optim.elementwise import Lion
from megazero.optim.lamb import Lamb
from megazero.optim.rule import Pieces, UpdateRule, is_norm_rule, is_reducing_rule

Params = Iterable[nn.Parameter] | Iterable[dict[str, Any]]


class RuleOptimizer(torch.optim.Optimizer, ABC):
    """A torch optimizer whose groups' options describe a rule of ours.

    Given to `megazero.initialize`, it names the groups and options. By itself it updates fp32 parameters of
    one process.

    Attributes:
        name: its name in messages.
        shared: the options that describe the rule; in `megazero.initialize`, all groups have the same.
    """

    name: str
    shared: tuple[str, ...]

    @abstractmethod
    def rule_of(self, group: Mapping[str, Any]) -> UpdateRule:
        """The rule that the options of a group describe."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update every parameter that has a gradient; return the closure's result, if there is one.

        Raises:
            ValueError: a parameter or a gradient is not fp32, or not contiguous.
            ConfigError: the rule takes place over all replicas.
        """
        if is_reducing_rule(self.rule_of(self.param_groups[0])):
            raise ConfigError(
                f"`step` of {self.name} must be called on the optimizer that `megazero.initialize` returns, "
                "because it takes place over all replicas"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            rule, decay = self.rule_of(group), group["weight_decay"]
            for param in (param for param in group["params"] if param.grad is not None):
                state = self.state[param]
                for name, start in rule.init_state(param).items() if not state else ():
                    state[name] = start
                state["step"] = state.get("step", 0) + 1
                moments = {name: state[name] for name in rule.state_names}
                pieces = Pieces([param], [param.grad], [moments], [decay], state["step"])
                asked: dict[str, Any] = {}
                if is_norm_rule(rule):
                    (measured,) = rule.prepare(pieces)
                    asked = {"norms": [torch.stack(list(measured))], "exempt": [decay == 0]}
                rule.step(pieces, group["lr"], **asked)
        return loss


class FusedLion(RuleOptimizer):
    """DeepSpeed's FusedLion (Chen et al. 2023): see `megazero.optim.elementwise.Lion`.

    Args:
        params: parameters or parameter groups.
        lr: learning rate.
        betas: share of the momentum in the sum whose sign is taken, and decay of the momentum.
        weight_decay: decoupled weight decay; groups may have their own.
    """

    name, shared = "FusedLion", ("betas",)

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def rule_of(self, group: Mapping[str, Any]) -> Lion:
        return Lion(*map(float, group["betas"]))


class FusedLamb(RuleOptimizer):
    """DeepSpeed's FusedLamb (You et al. 2020): see `megazero.optim.Lamb`.

    In `megazero.initialize`, norms are of whole parameters however they are sharded.

    Args:
        params: parameters or parameter groups.
        lr: learning rate.
        betas: decays of the moments.
        eps: added to the root of the second moment.
        weight_decay: share of the weights in their update; groups may have their own.
        own: `bias_correction` (true corrects the learning rate, as DeepSpeed does), the bounds `max_coeff`
            and `min_coeff` of the trust ratio, and apex's `use_nvlamb` (false leaves groups without weight
            decay unscaled).

    Raises:
        ConfigError: another option, or bounds out of order.
    """

    own: ClassVar[Mapping[str, Any]] = MappingProxyType(
        {"bias_correction": True, "max_coeff": 10.0, "min_coeff": 0.01, "use_nvlamb": True}
    )
    name, shared = "FusedLamb", ("betas", "eps", *own)

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        **own: Any,
    ):
        if strange := sorted(own.keys() - self.own.keys()):
            raise ConfigError(
                f"`options` of FusedLamb must be among {', '.join(self.own)}, but are {', '.join(strange)}; "
                "leave these out"
            )
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, **self.own, **own}
        options["bias_correction"] = options["bias_correction"] in (True, "rate")
        if not 0 <= options["min_coeff"] <= options["max_coeff"]:
            raise ConfigError(
                "`min_coeff` must be at least 0 and at most `max_coeff`, but they are "
                f"{options['min_coeff']} and {options['max_coeff']}; change one of them"
            )
        super().__init__(params, options)

    def rule_of(self, group: Mapping[str, Any]) -> Lamb:
        return _lamb_of({**group, "bias_correction": "rate" if group["bias_correction"] else "none"})


Kind = Literal["onebit-adam", "zero-one-adam", "onebit-lamb"]
_STEPS = ("var_freeze_step", "var_update_scaler", "local_step_scaler", "local_step_clipper")
_FACTORS = ("coeff_beta", "factor_min", "factor_max", "factor_threshold")
COMPRESSED: Mapping[Kind, tuple[str, ...]] = MappingProxyType(
    {
        "onebit-adam": ("betas", "eps", "freeze_step"),
        "zero-one-adam": ("betas", "eps", *_STEPS),
        "onebit-lamb": ("betas", "eps", "freeze_step", *FusedLamb.own, *_FACTORS),
    }
)
"""The options of each kind; all groups have the same."""
_OWN_WAY = "elements without gradients are left out anyway, and all parameters are frozen alike; leave it out"


class CompressedOptimizer(RuleOptimizer):
    """1-bit Adam, 0/1 Adam or 1-bit LAMB for `megazero.initialize`, as an `optimizer.type` of a JSON asks.

    Args:
        kind: the value of `--optimizer`.
        params: parameters or parameter groups.
        lr: learning rate.
        options: the other options, by DeepSpeed's names; `bias_correction` as `Lamb` has it.

    Raises:
        ConfigError: options that contradict each other, or a group with an option of DeepSpeed's that has no
            counterpart.
    """

    def __init__(self, kind: Kind, params: Any, lr: float, **options: Any):
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-8, **options})
        self.name, self.shared = kind, COMPRESSED[kind]
        for name in ("exp_avg_mask", "non_freeze"):
            if any(name in group for group in self.param_groups):
                raise ConfigError(f"`{name}` must not be an option of a parameter group, but is: {_OWN_WAY}")
        self.rule_of(self.param_groups[0])

    def rule_of(self, group: Mapping[str, Any]) -> UpdateRule:
        if self.name == "zero-one-adam":
            return ZeroOneAdam(**{name: group[name] for name in _STEPS}, **_adam(group))
        if self.name == "onebit-adam":
            return OnebitAdam(group["freeze_step"], **_adam(group))
        factors = {name: group[name] for name in _FACTORS}
        return OnebitLamb(group["freeze_step"], _lamb_of(group), **factors)


def _adam(group: Mapping[str, Any]) -> dict[str, Any]:
    beta1, beta2 = group["betas"]
    return {"beta1": float(beta1), "beta2": float(beta2), "eps": group["eps"]}


def _lamb_of(group: Mapping[str, Any]) -> Lamb:
    return Lamb(
        **_adam(group),
        min_coeff=group["min_coeff"],
        max_coeff=group["max_coeff"],
        bias_correction=group["bias_correction"],
        adapt_all=group["use_nvlamb"],
    )


FUSED: Mapping[str, type[FusedLion] | type[FusedLamb]] = MappingProxyType(
    {"lion": FusedLion, "lamb": FusedLamb}
)
"""The classes by the value of `--optimizer`."""
