"""AdamW and SGD, of which each element's update depends only on that element, so that a tensor may be cut
anywhere; and the choice of a rule.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from megazero.config.tree import OptimizerConfig
from megazero.ops.adam import adam_step
from megazero.optim.compressed import OnebitAdam, OnebitLamb, ZeroOneAdam
from megazero.optim.lamb import Lamb
from megazero.optim.rule import Needs, UpdateRule, check_pieces, zeros_like


@dataclass(frozen=True)
class Adam:
    """AdamW: Adam (Kingma & Ba 2015) with decoupled weight decay (Loshchilov & Hutter 2019).

    ``m = b1 m + (1 - b1) g``, ``v = b2 v + (1 - b2) g^2``,
    ``p = p (1 - lr wd) - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)``.
    """

    needs: ClassVar[Needs] = Needs()

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8

    @property
    def state_names(self) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq")

    def init_state(self, like: Tensor) -> dict[str, Tensor]:
        return zeros_like(self.state_names, like)

    def step(self, params, grads, states, *, step, lr, weight_decays) -> None:
        check_pieces(self.state_names, params, grads, states, step, weight_decays)
        # The fused kernel takes one weight decay per call, and most models have two values.
        for decay in dict.fromkeys(weight_decays):
            chosen = [i for i, other in enumerate(weight_decays) if other == decay and params[i].numel() > 0]
            if chosen:
                adam_step(
                    [params[i] for i in chosen],
                    [grads[i] for i in chosen],
                    [states[i]["exp_avg"] for i in chosen],
                    [states[i]["exp_avg_sq"] for i in chosen],
                    step=step,
                    lr=lr,
                    beta1=self.beta1,
                    beta2=self.beta2,
                    eps=self.eps,
                    weight_decay=decay,
                )


@dataclass(frozen=True)
class Sgd:
    """SGD with heavy-ball momentum: ``u = momentum u + g + wd p``, ``p = p - lr u``.

    As in torch's SGD, which Megatron and DeepSpeed take, weight decay is a part of the gradient, and momentum
    carries it on.
    """

    needs: ClassVar[Needs] = Needs()

    momentum: float = 0.9

    @property
    def state_names(self) -> tuple[str, ...]:
        return ("momentum",) if self.momentum else ()

    def init_state(self, like: Tensor) -> dict[str, Tensor]:
        return zeros_like(self.state_names, like)

    @torch.no_grad()
    def step(self, params, grads, states, *, step, lr, weight_decays) -> None:
        check_pieces(self.state_names, params, grads, states, step, weight_decays)
        for param, grad, state, decay in zip(params, grads, states, weight_decays, strict=True):
            direction = grad.add(param, alpha=decay) if decay else grad
            if self.momentum:
                direction = state["momentum"].mul_(self.momentum).add_(direction)
            param.add_(direction, alpha=-lr)


def build_update_rule(config: OptimizerConfig) -> UpdateRule:
    """The update rule that the configuration names."""
    if config.optimizer == "sgd":
        return Sgd(config.sgd_momentum)
    adam = Adam(config.adam_beta1, config.adam_beta2, config.adam_eps)
    lamb = Lamb(
        **vars(adam),
        min_coeff=config.lamb_min_coeff,
        max_coeff=config.lamb_max_coeff,
        bias_correction=config.lamb_bias_correction,
        adapt_all=config.lamb_adapt_all,
    )
    if config.optimizer == "lamb":
        return lamb
    if config.optimizer == "onebit-lamb":
        return OnebitLamb(
            config.onebit_freeze_step,
            lamb,
            config.onebit_lamb_coeff_beta,
            config.onebit_lamb_factor_min,
            config.onebit_lamb_factor_max,
            config.onebit_lamb_factor_threshold,
        )
    if config.optimizer == "onebit-adam":
        return OnebitAdam(config.onebit_freeze_step, **vars(adam))
    if config.optimizer == "zero-one-adam":
        return ZeroOneAdam(
            config.zero_one_var_freeze_step,
            config.zero_one_var_update_scaler,
            config.zero_one_local_step_scaler,
            config.zero_one_local_step_clipper,
            **vars(adam),
        )
    return adam
