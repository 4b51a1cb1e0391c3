"""`build_update_rule`: the update rule that a configuration names."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import torch

from megazero.config.tree import OptimizerConfig
from megazero.optim.adagrad import Adagrad
from megazero.optim.compressed import OnebitAdam, OnebitLamb, ZeroOneAdam
from megazero.optim.lamb import Lamb
from megazero.optim.lion import Lion
from megazero.optim.muon import NEWTON_SCHULZ, Muon
from megazero.optim.rescaled import Rescaled
from megazero.optim.rule import UpdateRule
from megazero.optim.torch_rule import TorchRule, on_pieces
from megazero.optim.update import Adam, Sgd


def build_update_rule(config: OptimizerConfig) -> UpdateRule:
    """The update rule that the configuration names."""
    name = config.optimizer
    adam = Adam(config.adam_beta1, config.adam_beta2, config.adam_eps)
    if name == "adam":
        return adam
    if name == "sgd":
        return Sgd(config.sgd_momentum)
    if name == "lion":
        return Lion(config.lion_beta1, config.lion_beta2)
    if name == "adagrad":
        return Adagrad(config.adagrad_eps)
    if name == "lamb":
        return _lamb(config)
    if name == "muon":
        return _muon(config)
    return _compressed(config, adam) or _of_torch(config)


def _lamb(config: OptimizerConfig) -> Lamb:
    return Lamb(
        config.adam_beta1,
        config.adam_beta2,
        config.adam_eps,
        config.lamb_min_coeff,
        config.lamb_max_coeff,
        config.lamb_bias_correction,
        config.lamb_adapt_all,
    )


def _compressed(config: OptimizerConfig, adam: Adam) -> UpdateRule | None:
    """A rule that sums gradients itself, a bit per element; None if the configuration names another."""
    if config.optimizer == "onebit-adam":
        return OnebitAdam(config.onebit_freeze_step, **vars(adam), precondition=config.onebit_precondition)
    if config.optimizer == "zero-one-adam":
        return ZeroOneAdam(
            config.zero_one_var_freeze_step,
            config.zero_one_var_update_scaler,
            config.zero_one_local_step_scaler,
            config.zero_one_local_step_clipper,
            **vars(adam),
            precondition=config.onebit_precondition,
        )
    if config.optimizer == "onebit-lamb":
        return OnebitLamb(
            config.onebit_freeze_step,
            _lamb(config),
            config.onebit_lamb_coeff_beta,
            config.onebit_lamb_factor_min,
            config.onebit_lamb_factor_max,
            config.onebit_lamb_factor_threshold,
        )
    return None


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
        NEWTON_SCHULZ[config.muon_coefficient_type],
        config.muon_num_ns_steps,
        config.muon_scale_mode,
        config.muon_extra_scale_factor,
        config.muon_split_qkv,
        config.muon_ns_dtype,
        rest,
    )


def _of_torch(config: OptimizerConfig) -> UpdateRule:
    """A class of torch.optim with the configuration's options; others have torch's defaults."""
    moments = {"betas": (config.adam_beta1, config.adam_beta2), "eps": config.adam_eps}
    rows: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
        "adadelta": (torch.optim.Adadelta, {"rho": config.adadelta_rho, "eps": config.adadelta_eps}),
        "adamax": (torch.optim.Adamax, moments),
        "nadam": (torch.optim.NAdam, moments),
        "radam": (torch.optim.RAdam, moments),
        "rmsprop": (torch.optim.RMSprop, {"alpha": config.rmsprop_alpha, "eps": config.adam_eps}),
    }
    kind, options = rows[config.optimizer]
    return on_pieces(TorchRule(kind, MappingProxyType(options)))
