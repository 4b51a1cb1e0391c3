"""`build_update_rule`: the update rule that a configuration names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Any

import torch

from megazero.config.tree.optimizer import OptimizerConfig
from megazero.optim.compressed.onebit_adam import OnebitAdam
from megazero.optim.compressed.onebit_lamb import OnebitLamb
from megazero.optim.compressed.zero_one_adam import ZeroOneAdam, ZeroOneSteps
from megazero.optim.elementwise import ELEMENTWISE
from megazero.optim.lamb import Lamb
from megazero.optim.muon import NEWTON_SCHULZ, Muon, NewtonSchulz
from megazero.optim.rescaled import Rescaled
from megazero.optim.rule import UpdateRule
from megazero.optim.torch_rule import TorchRule, on_pieces


def build_update_rule(config: OptimizerConfig) -> UpdateRule:
    """The update rule that the configuration names."""
    name = config.optimizer
    if name in ELEMENTWISE:
        kind = ELEMENTWISE[name]
        return kind(**{field.name: _setting(config, name, field.name) for field in fields(kind)})
    return _BUILDERS[name](config)


def _setting(config: OptimizerConfig, rule: str, field: str) -> object:
    """The setting of a rule's field: of the rule's own name or, where there is none, of Adam's."""
    own = f"{rule}_{field}"
    return getattr(config, own if own in OptimizerConfig.model_fields else f"adam_{field}")


def takes_signs(config: OptimizerConfig) -> bool:
    """Whether weights move by a sign, so that a gradient which is only rounding counts as any other."""
    used = {config.optimizer, config.muon_scalar_optimizer}
    return any(rule.takes_signs for name, rule in ELEMENTWISE.items() if name in used)


def _adam(config: OptimizerConfig) -> dict[str, Any]:
    return {"beta1": config.adam_beta1, "beta2": config.adam_beta2, "eps": config.adam_eps}


def _lamb(config: OptimizerConfig) -> Lamb:
    return Lamb(
        **_adam(config),
        min_coeff=config.lamb_min_coeff,
        max_coeff=config.lamb_max_coeff,
        bias_correction=config.lamb_bias_correction,
        adapt_all=config.lamb_adapt_all,
    )


def _onebit_adam(config: OptimizerConfig) -> UpdateRule:
    return OnebitAdam(config.onebit_freeze_step, **_adam(config), precondition=config.onebit_precondition)


def _zero_one_adam(config: OptimizerConfig) -> UpdateRule:
    steps = ZeroOneSteps(
        config.zero_one_var_freeze_step,
        config.zero_one_var_update_scaler,
        config.zero_one_local_step_scaler,
        config.zero_one_local_step_clipper,
    )
    return ZeroOneAdam(steps, **_adam(config), precondition=config.onebit_precondition)


def _onebit_lamb(config: OptimizerConfig) -> UpdateRule:
    return OnebitLamb(
        config.onebit_freeze_step,
        _lamb(config),
        config.onebit_lamb_coeff_beta,
        config.onebit_lamb_factor_min,
        config.onebit_lamb_factor_max,
        config.onebit_lamb_factor_threshold,
    )


def _muon(config: OptimizerConfig) -> UpdateRule:
    """Muon beside the rule for everything that is not a matrix."""
    rest: UpdateRule = build_update_rule(
        config.model_copy(update={"optimizer": config.muon_scalar_optimizer})
    )
    if config.muon_scalar_lr is not None:
        rest = Rescaled(rest, config.muon_scalar_lr / config.lr)
    return Muon(
        config.muon_momentum,
        config.muon_nesterov,
        NewtonSchulz(
            NEWTON_SCHULZ[config.muon_coefficient_type], config.muon_num_ns_steps, config.muon_ns_dtype
        ),
        config.muon_scale_mode,
        config.muon_extra_scale_factor,
        config.muon_split_qkv,
        rest,
    )


def _of_torch(
    kind: type[torch.optim.Optimizer], options: Callable[[OptimizerConfig], Mapping[str, object]]
) -> Callable[[OptimizerConfig], UpdateRule]:
    """A class of torch.optim with the configuration's options; others have torch's defaults."""
    return lambda config: on_pieces(TorchRule(kind, MappingProxyType(dict(options(config)))))


def _moments(config: OptimizerConfig) -> Mapping[str, object]:
    return {"betas": (config.adam_beta1, config.adam_beta2), "eps": config.adam_eps}


_BUILDERS: Mapping[str, Callable[[OptimizerConfig], UpdateRule]] = MappingProxyType(
    {
        "lamb": _lamb,
        "muon": _muon,
        "onebit-adam": _onebit_adam,
        "zero-one-adam": _zero_one_adam,
        "onebit-lamb": _onebit_lamb,
        "adadelta": _of_torch(
            torch.optim.Adadelta, lambda config: {"rho": config.adadelta_rho, "eps": config.adadelta_eps}
        ),
        "adamax": _of_torch(torch.optim.Adamax, _moments),
        "nadam": _of_torch(torch.optim.NAdam, _moments),
        "radam": _of_torch(torch.optim.RAdam, _moments),
        "rmsprop": _of_torch(
            torch.optim.RMSprop, lambda config: {"alpha": config.rmsprop_alpha, "eps": config.adam_eps}
        ),
    }
)
