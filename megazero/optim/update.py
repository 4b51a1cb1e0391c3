"""Update rules: how a flat fp32 shard of parameters moves, given its gradient and state.

A rule knows nothing of groups, shards or dtypes of the model: ZeRO hands it flat pieces of the master
weights. Each element's update depends on that element alone, so a tensor may be cut anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megazero.config.tree import OptimizerConfig
from megazero.ops.adam import adam_step


class UpdateRule(Protocol):
    """One optimizer's arithmetic.

    `state_names` are the keys of each tensor's state; they name the arrays of a checkpoint.
    """

    @property
    def state_names(self) -> tuple[str, ...]:
        """Keys of `init_state`'s result, in checkpoint order."""

    def init_state(self, like: Tensor) -> dict[str, Tensor]:
        """Fresh state of one parameter tensor: zeros of its shape, dtype and device."""

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
        """Update `params` and `states` in place.

        Args:
            params: contiguous fp32 tensors of any shape, empty ones included.
            grads: for each parameter, a contiguous fp32 gradient of its shape: unscaled and clipped.
            states: for each parameter, its `init_state`.
            step: number of this update, from 1 (skipped steps do not count).
            lr: learning rate.
            weight_decays: for each parameter, its decoupled weight decay.

        Raises:
            ValueError: for lists of unequal length, a step below 1, or a tensor that is not contiguous,
                not fp32 or not of its parameter's shape. Nothing has been changed then.
        """


@dataclass(frozen=True)
class Adam:
    """AdamW: Adam (Kingma & Ba 2015) with decoupled weight decay (Loshchilov & Hutter 2019).

    ``m = b1 m + (1 - b1) g``, ``v = b2 v + (1 - b2) g^2``,
    ``p = p (1 - lr wd) - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)``.
    """

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8

    @property
    def state_names(self) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq")

    def init_state(self, like: Tensor) -> dict[str, Tensor]:
        return _zeros(self.state_names, like)

    def step(self, params, grads, states, *, step, lr, weight_decays) -> None:
        _check(self.state_names, params, grads, states, step, weight_decays)
        # The fused kernel takes one weight decay per call, and there are two values in most models.
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
    """SGD with heavy-ball momentum: ``u = momentum u + g``, ``p = p (1 - lr wd) - lr u``.

    The weight decay is decoupled like Adam's. torch's and Megatron's SGD add ``wd p`` to the gradient
    instead, which the momentum then carries on; without momentum, or without decay, all are the same.
    """

    momentum: float = 0.9

    @property
    def state_names(self) -> tuple[str, ...]:
        return ("momentum",) if self.momentum else ()

    def init_state(self, like: Tensor) -> dict[str, Tensor]:
        return _zeros(self.state_names, like)

    @torch.no_grad()
    def step(self, params, grads, states, *, step, lr, weight_decays) -> None:
        _check(self.state_names, params, grads, states, step, weight_decays)
        for param, grad, state, decay in zip(params, grads, states, weight_decays, strict=True):
            direction = state["momentum"].mul_(self.momentum).add_(grad) if self.momentum else grad
            if decay:
                param.mul_(1.0 - lr * decay)
            param.add_(direction, alpha=-lr)


def build_update_rule(config: OptimizerConfig) -> UpdateRule:
    """The update rule that the configuration names."""
    if config.optimizer == "sgd":
        return Sgd(config.sgd_momentum)
    return Adam(config.adam_beta1, config.adam_beta2, config.adam_eps)


def _zeros(names: tuple[str, ...], like: Tensor) -> dict[str, Tensor]:
    """Named zeros, contiguous whatever the strides of `like` are."""
    return {name: torch.zeros_like(like, memory_format=torch.contiguous_format) for name in names}


def _check(names, params, grads, states, step, weight_decays) -> None:
    """Refuse arguments that an in-place kernel would read or write wrongly."""
    lengths = [len(params), len(grads), len(states), len(weight_decays)]
    if len(set(lengths)) != 1:
        raise ValueError(
            f"`params`, `grads`, `states` and `weight_decays` must be of one length, but have {lengths}; "
            f"give one of each per tensor."
        )
    if step < 1:
        raise ValueError(f"`step` must be at least 1, but is {step}; count updates from 1.")
    for index, (param, grad, state) in enumerate(zip(params, grads, states, strict=True)):
        if tuple(state) != names:
            raise ValueError(
                f"`states[{index}]` must have the keys {names}, but has {tuple(state)}; make it with "
                f"`init_state`."
            )
        for name, tensor in {"params": param, "grads": grad, **state}.items():
            if not tensor.is_contiguous():
                raise ValueError(
                    f"`{name}[{index}]` must be contiguous, but has strides {tensor.stride()}; pass a flat "
                    f"tensor."
                )
            if tensor.dtype != torch.float32 or tensor.shape != param.shape:
                raise ValueError(
                    f"`{name}[{index}]` must be fp32 of shape {tuple(param.shape)}, but is {tensor.dtype} of "
                    f"shape {tuple(tensor.shape)}; convert it."
                )
