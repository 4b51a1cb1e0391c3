"""LAMB under DeepSpeed's name, as a torch optimizer: for `megazero.initialize`, or by itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from megazero.errors import ConfigError
from megazero.optim import Lamb

_OWN: Mapping[str, Any] = MappingProxyType(
    {"bias_correction": True, "max_coeff": 10.0, "min_coeff": 0.01, "use_nvlamb": True}
)


class FusedLamb(torch.optim.Optimizer):
    """DeepSpeed's FusedLamb (You et al. 2020): see `megazero.optim.Lamb`.

    Given to `megazero.initialize`, it names the groups and options, and norms are of whole parameters however
    they are sharded. By itself it updates fp32 parameters of one process.

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

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        **own: Any,
    ):
        if strange := sorted(own.keys() - _OWN.keys()):
            raise ConfigError(
                f"`options` of FusedLamb must be among {', '.join(_OWN)}, but are {', '.join(strange)}; "
                "leave these out"
            )
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, **_OWN, **own}
        if not 0 <= options["min_coeff"] <= options["max_coeff"]:
            raise ConfigError(
                "`min_coeff` must be at least 0 and at most `max_coeff`, but they are "
                f"{options['min_coeff']} and {options['max_coeff']}; change one of them"
            )
        super().__init__(params, options)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update every parameter that has a gradient; return the closure's result, if there is one.

        Raises:
            ValueError: a parameter or a gradient is not fp32, or not contiguous.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            rule, decay = lamb_of(group), group["weight_decay"]
            for param in (param for param in group["params"] if param.grad is not None):
                state = self.state[param]
                state.setdefault("step", 0)
                state["step"] += 1
                for name, start in rule.init_state(param).items() if state["step"] == 1 else ():
                    state[name] = start
                moments = {name: state[name] for name in rule.state_names}
                piece, facts = ([param], [param.grad], [moments]), {"step": state["step"]}
                ((weight, update),) = rule.prepare(*piece, **facts, weight_decays=[decay])
                norms = [torch.stack([weight, update])]
                rule.step(
                    *piece, **facts, lr=group["lr"], weight_decays=[decay], norms=norms, exempt=[decay == 0]
                )
        return loss


def lamb_of(group: Mapping[str, Any]) -> Lamb:
    """The rule that the options of a group of `FusedLamb` describe."""
    beta1, beta2 = group["betas"]
    return Lamb(
        float(beta1),
        float(beta2),
        group["eps"],
        group["min_coeff"],
        group["max_coeff"],
        "rate" if group["bias_correction"] else "none",
        group["use_nvlamb"],
    )
