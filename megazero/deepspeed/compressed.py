"""DeepSpeed's 1-bit optimizers, as torch optimizers that say which groups and options there are."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, NoReturn

import torch

from megazero.errors import ConfigError
from megazero.optim import Lamb, OnebitAdam, OnebitLamb, UpdateRule, ZeroOneAdam

Kind = Literal["onebit-adam", "zero-one-adam", "onebit-lamb"]
_STEPS = ("var_freeze_step", "var_update_scaler", "local_step_scaler", "local_step_clipper")
_FACTORS = ("coeff_beta", "factor_min", "factor_max", "factor_threshold")
OPTIONS: Mapping[Kind, tuple[str, ...]] = MappingProxyType(
    {
        "onebit-adam": ("freeze_step",),
        "zero-one-adam": _STEPS,
        "onebit-lamb": (
            *("freeze_step", "max_coeff", "min_coeff", "bias_correction", "use_nvlamb"),
            *_FACTORS,
        ),
    }
)
"""The options of each kind besides betas and epsilon; all groups have the same."""
_OWN_WAY = "elements without gradients are left out anyway, and all parameters are frozen alike; leave it out"


class CompressedOptimizer(torch.optim.Optimizer):
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
        super().__init__(params, {"lr": lr, **options})
        self.kind = kind
        for name in ("exp_avg_mask", "non_freeze"):
            if any(name in group for group in self.param_groups):
                raise ConfigError(f"`{name}` must not be an option of a parameter group, but is: {_OWN_WAY}")
        self.rule_of(self.param_groups[0])

    def rule_of(self, group: Mapping[str, Any]) -> UpdateRule:
        """The rule that the options of a group describe."""
        betas = tuple(float(beta) for beta in group["betas"])
        adam = {"beta1": betas[0], "beta2": betas[1], "eps": group["eps"]}
        if self.kind == "zero-one-adam":
            return ZeroOneAdam(**{name: group[name] for name in _STEPS}, **adam)
        if self.kind == "onebit-adam":
            return OnebitAdam(group["freeze_step"], **adam)
        lamb = Lamb(
            **adam,
            min_coeff=group["min_coeff"],
            max_coeff=group["max_coeff"],
            bias_correction=group["bias_correction"],
            adapt_all=group["use_nvlamb"],
        )
        return OnebitLamb(group["freeze_step"], lamb, **{name: group[name] for name in _FACTORS})

    def step(self, closure: object = None) -> NoReturn:
        """Refuse to update: only the optimizer that `megazero.initialize` returns does.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            f"`step` of {self.kind} must be called on the optimizer that `megazero.initialize` returns, "
            "because it takes place over all replicas"
        )
