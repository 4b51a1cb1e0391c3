"""1-bit Adam: once its second moment is frozen, replicas exchange one bit per element of the first."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from megazero.errors import ConfigError
from megazero.optim.compressed.mean import compressed_mean
from megazero.optim.elementwise import Adam
from megazero.optim.rule import Needs, Pieces, ReducingRule, Replicas

LATE = 10**9
"""A step at which ``1 - beta^t`` is 1 for every beta that is below 1 by more than rounding."""


@dataclass(frozen=True)
class OnebitAdam(ReducingRule):
    """1-bit Adam (Tang et al. 2021, "1-bit Adam: Communication Efficient Large-Scale Training").

    For `freeze_step` updates it is `Adam`, bit for bit. From then on v stays as it is, gradients are not
    summed, and ``m = C(b1 m + (1 - b1) g)``, where g is a replica's own gradient and C is
    `compressed_mean`; ``p = p (1 - lr wd) - lr m' / (sqrt(v') + eps)``. The moments are corrected for their
    start as Adam's are, v for `freeze_step` updates, unless `corrects` is false.

    An element whose v is 0 then, because it never had a gradient (rows of an embedding that no sample
    reaches, and padding), does not move and is left out of C; with a v of 0, one bit would move it by
    ``lr / eps``. This is what DeepSpeed's `exp_avg_mask` is for.

    With `precondition`, which is the default, C takes its scale of ``m / (sqrt(v') + eps)``: a bit stands for
    the same share of the update in each element. The paper's bits stand for the same amount of m, which moves
    an element more the smaller its v is, so an element whose gradient is only rounding, such as the keys'
    bias, grows without bound. As v stays as it is, this is the paper's algorithm in other units (ours).

    Attributes:
        beta1, beta2, eps: as Adam's.
        freeze_step: number of exact updates.
        precondition: choose the scale of a message by its effect on the update.
        corrects: whether the bias of the moments is corrected, which DeepSpeed never does here.

    Raises:
        ConfigError: `freeze_step` is below 1.
    """

    needs: ClassVar[Needs] = Needs(reduces=True)
    state_names: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")

    freeze_step: int
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    precondition: bool = True
    corrects: bool = True

    def __post_init__(self) -> None:
        if self.freeze_step < 1:
            raise ConfigError(
                f"`freeze_step` must be at least 1, but is {self.freeze_step}; without an exact step no "
                "element has a second moment, and none would move: choose 15 to 25 percent of the steps"
            )

    def sums_exactly(self, step: int) -> bool:
        return step <= self.freeze_step

    @torch.no_grad()
    def reduce(self, grads: Tensor, state: dict[str, Tensor], *, replicas: Replicas, step: int) -> None:
        """Bring the first moment up to date on all replicas; the gradients are used up."""
        momentum = state["exp_avg"]
        # The mean of the replicas' gradients times their number is the whole gradient.
        momentum.mul_(self.beta1).add_(grads, alpha=(1.0 - self.beta1) * replicas.group.size)
        units = self._roots(state["exp_avg_sq"]) if self.precondition else None
        compressed_mean(momentum, state["exp_avg_sq"] > 0, replicas, units)

    @torch.no_grad()
    def step(self, pieces: Pieces, lr: float) -> None:
        if self.sums_exactly(pieces.step):
            at = pieces.step if self.corrects else LATE
            Adam(self.beta1, self.beta2, self.eps).step(replace(pieces, step=at), lr)
            return
        pieces.check(self.state_names)
        first = 1.0 - self.beta1**pieces.step if self.corrects else 1.0
        for param, state, decay in zip(pieces.params, pieces.states, pieces.weight_decays, strict=True):
            param.mul_(1.0 - lr * decay)
            param.addcdiv_(state["exp_avg"], self._roots(state["exp_avg_sq"]), value=-lr / first)

    def _roots(self, variance: Tensor) -> Tensor:
        """The divisor of updates after the freeze: ``sqrt(v') + eps``."""
        second = 1.0 - self.beta2**self.freeze_step if self.corrects else 1.0
        return variance.sqrt().div_(math.sqrt(second)).add_(self.eps)
