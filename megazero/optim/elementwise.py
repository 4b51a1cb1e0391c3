"""The rules that move each element by itself, so that a tensor may be cut anywhere.

A rule is its name, its state and its formula. One with kernels also has coefficients, and its formula once
more in csrc/update/rules.hpp. `ELEMENTWISE` is their table.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor

from megazero.ops.update import ElementRule, StepFacts, UpdateCall, heeds_signals, update_step
from megazero.optim.rule import Needs, Pieces, UpdateRule


@dataclass(frozen=True)
class Elementwise(UpdateRule, ElementRule):
    """A rule that the operator `megazero.ops.update` applies.

    Attributes:
        name: its name in `--optimizer`, and that of its kernels.
        takes_signs: whether a gradient that is only rounding moves weights as far as a larger one does.
    """

    needs: ClassVar[Needs] = Needs(one_pass=True)
    takes_signs: ClassVar[bool] = False

    def heeds_signals(self, device: str) -> bool:
        return heeds_signals(device, self)

    def step(self, pieces: Pieces, lr: float) -> None:
        """Update the pieces, those of one weight decay in one call of the kernel."""
        pieces.check(self.state_names)
        weights = pieces.weights
        for decay, chosen in pieces.by_decay():
            call = UpdateCall(
                self,
                StepFacts(pieces.step, lr, decay, pieces.signals),
                [pieces.params[i] for i in chosen],
                [pieces.grads[i] for i in chosen],
                [tuple(pieces.states[i].values()) for i in chosen],
                [weights[i] for i in chosen],
                pieces.scale,
            )
            update_step(call)


@dataclass(frozen=True)
class Adam(Elementwise):
    """AdamW: Adam (Kingma & Ba 2015) with decoupled weight decay (Loshchilov & Hutter 2019).

    ``m = b1 m + (1 - b1) g``, ``v = b2 v + (1 - b2) g^2``,
    ``p = p (1 - lr wd) - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)``.
    """

    name: ClassVar[str] = "adam"
    state_names: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8

    def move(self, at: StepFacts, p: Tensor, g: Tensor, /, *states: Tensor) -> None:
        m, v = states
        m.lerp_(g, 1 - self.beta1)
        v.mul_(self.beta2).addcmul_(g, g, value=1 - self.beta2)
        p.mul_(1 - at.lr * at.weight_decay)
        denominator = (v.sqrt() / math.sqrt(1 - self.beta2**at.step)).add_(self.eps)
        p.sub_((m / denominator).mul_(at.lr / (1 - self.beta1**at.step)))

    def coefficients(self, at: StepFacts) -> tuple[float, ...]:
        root = math.sqrt(1 - self.beta2**at.step)
        rate, decay = at.lr * root / (1 - self.beta1**at.step), 1 - at.lr * at.weight_decay
        return (1.0 - self.beta1, self.beta2, 1.0 - self.beta2, rate, self.eps * root, decay)


@dataclass(frozen=True)
class AdEMAMix(Elementwise):
    """AdEMAMix (Pagliardini et al. 2024, arXiv:2409.03137): AdamW with a second, slower mean of gradients.

    ``m = b1 m + (1 - b1) g``, ``s = b3 s + (1 - b3) g``, ``v = b2 v + (1 - b2) g^2``,
    ``p = p (1 - lr wd) - lr (m / (1 - b1^t) + a s) / (sqrt(v / (1 - b2^t)) + eps)``.

    Attributes:
        beta3, alpha: b3 and a once both are warm.
        beta3_warmup: updates until then of b3, whose half-life grows evenly from that of b1.
        alpha_warmup: updates until then of a, which grows evenly from 0.
    """

    name: ClassVar[str] = "ademamix"
    state_names: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_slow", "exp_avg_sq")

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    beta3: float = 0.9999
    alpha: float = 5.0
    beta3_warmup: int = 0
    alpha_warmup: int = 0

    def move(self, at: StepFacts, p: Tensor, g: Tensor, /, *states: Tensor) -> None:
        m, slow, v = states
        alpha = self.alpha * min(at.step / max(self.alpha_warmup, 1), 1.0)
        m.lerp_(g, 1 - self.beta1)
        slow.lerp_(g, 1 - self._beta3(at.step))
        v.mul_(self.beta2).addcmul_(g, g, value=1 - self.beta2)
        denominator = (v.sqrt() / math.sqrt(1 - self.beta2**at.step)).add_(self.eps)
        direction = (m / (1 - self.beta1**at.step)).add_(slow, alpha=alpha).div_(denominator)
        p.mul_(1 - at.lr * at.weight_decay).sub_(direction, alpha=at.lr)

    def _beta3(self, step: int) -> float:
        """The decay in update `step`; half-lives, -ln(2) / ln(decay), are interpolated."""
        share = step / max(self.beta3_warmup, 1)
        if share >= 1 or not 0 < self.beta1 < self.beta3:
            return self.beta3
        return math.exp(1 / ((1 - share) / math.log(self.beta1) + share / math.log(self.beta3)))


@dataclass(frozen=True)
class Sgd(Elementwise):
    """SGD with heavy-ball momentum (Polyak 1964): ``u = momentum u + g + wd p``, ``p = p - lr u``.

    As in torch's SGD, which Megatron and DeepSpeed take, weight decay is a part of the gradient, and momentum
    carries it on.
    """

    name: ClassVar[str] = "sgd"

    momentum: float = 0.9

    @property
    def state_names(self) -> tuple[str, ...]:
        return ("momentum",) if self.momentum else ()

    def move(self, at: StepFacts, p: Tensor, g: Tensor, /, *states: Tensor) -> None:
        direction = g.add(p, alpha=at.weight_decay) if at.weight_decay else g
        for u in states:
            direction = u.mul_(self.momentum).add_(direction)
        p.add_(direction, alpha=-at.lr)

    def coefficients(self, at: StepFacts) -> tuple[float, ...]:
        return (at.lr, self.momentum, at.weight_decay)


@dataclass(frozen=True)
class Lion(Elementwise):
    """Lion (Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", algorithm 2).

    ``p = p (1 - lr wd) - lr sign(b1 m + (1 - b1) g)``, then ``m = b2 m + (1 - b2) g``.
    """

    name: ClassVar[str] = "lion"
    takes_signs: ClassVar[bool] = True
    state_names: ClassVar[tuple[str, ...]] = ("exp_avg",)

    beta1: float = 0.9
    beta2: float = 0.99

    def move(self, at: StepFacts, p: Tensor, g: Tensor, /, *states: Tensor) -> None:
        (m,) = states
        direction = torch.lerp(g, m, self.beta1).sign_()
        p.mul_(1.0 - at.lr * at.weight_decay).sub_(direction, alpha=at.lr)
        m.lerp_(g, 1.0 - self.beta2)

    def coefficients(self, at: StepFacts) -> tuple[float, ...]:
        decay = 1.0 - at.lr * at.weight_decay
        return (self.beta1, 1.0 - self.beta1, 1.0 - self.beta2, at.lr, decay)


@dataclass(frozen=True)
class Adagrad(Elementwise):
    """Adagrad (Duchi et al. 2011), element by element: ``s = s + g^2``, ``p = p - lr g / (sqrt(s) + eps)``.

    As in torch's Adagrad and DeepSpeed's, weight decay is a part of the gradient: ``g + wd p`` stands for g.
    """

    name: ClassVar[str] = "adagrad"
    state_names: ClassVar[tuple[str, ...]] = ("sum",)

    eps: float = 1e-10

    def move(self, at: StepFacts, p: Tensor, g: Tensor, /, *states: Tensor) -> None:
        (total,) = states
        g = g.add(p, alpha=at.weight_decay) if at.weight_decay else g
        total.addcmul_(g, g)
        p.addcdiv_(g, total.sqrt().add_(self.eps), value=-at.lr)

    def coefficients(self, at: StepFacts) -> tuple[float, ...]:
        return (at.lr, self.eps, at.weight_decay)


ELEMENTWISE: Mapping[str, type[Elementwise]] = MappingProxyType(
    {rule.name: rule for rule in (Adam, AdEMAMix, Sgd, Lion, Adagrad)}
)
"""The rules by their names.

Field `beta1` of rule `lion` is `lion_beta1` of the configuration, or `adam_beta1` if it had no such setting.
"""
