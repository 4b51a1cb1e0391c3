"""1-bit LAMB: compressed first moments, and trust ratios that follow a second moment which is frozen."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from megazero.errors import ConfigError
from megazero.optim.compressed.mean import compressed_mean
from megazero.optim.lamb import Lamb
from megazero.optim.rule import Needs, NormRule, Pieces, ReducingRule, Replicas


@dataclass(frozen=True)
class OnebitLamb(NormRule, ReducingRule):
    """1-bit LAMB (Li et al. 2021, "1-bit LAMB: Communication Efficient Large-Scale Large-Batch Training").

    For `freeze_step` updates it is `Lamb`, and c' is a running average of each parameter's trust ratio. From
    then on v stays as it is, and ``m = C(b1 m + (1 - b1) g)`` as in `OnebitAdam`. The gradient that this
    comes to, ``(m_t - b1 m_(t-1)) / (1 - b1)``, updates a fresh copy of v, which no update divides by, but
    which says how far v is off: ``f = max (sqrt(v) + eps) / (sqrt(fresh v) + eps)`` over the parameter. For
    ``r = min(1, |u without decay| / |u|)``, f becomes ``f r + 1 - r``, is kept within bounds and near its
    last value, and ``p = p - lr c' f u``.

    The paper evens the magnitudes of momenta, because it sends all of them by one scale; here each parameter
    has a scale of its own, which makes that superfluous. The average begins with the first ratio, not with 0.

    Attributes:
        freeze_step: number of exact updates.
        lamb: the rule until then; its moments' decays, epsilon and corrections hold throughout, and the
            correction of v stays as it was at `freeze_step`.
        coeff_beta: decay of the running average.
        factor_min, factor_max: bounds of f.
        factor_threshold: the largest change of f from one step to the next, as a share of it.

    Raises:
        ConfigError: `freeze_step` is below 1, or the bounds are out of order.
    """

    needs: ClassVar[Needs] = Needs(
        norms=("weight", "update", "undecayed"),
        reduces=True,
        scalars=("coefficient", "factor", "variance_ratio"),
    )
    state_names: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq", "exp_avg_sq_fresh")

    freeze_step: int
    lamb: Lamb = field(default_factory=Lamb)
    coeff_beta: float = 0.9
    factor_min: float = 0.5
    factor_max: float = 4.0
    factor_threshold: float = 0.1

    def __post_init__(self) -> None:
        if self.freeze_step < 1:
            raise ConfigError(
                f"`freeze_step` must be at least 1, but is {self.freeze_step}; without an exact step no "
                "element has a second moment, and none would move"
            )
        if not 0 < self.factor_min <= self.factor_max:
            raise ConfigError(
                "`factor_min` must be above 0 and at most `factor_max`, but they are "
                f"{self.factor_min} and {self.factor_max}; change one of them"
            )

    def sums_exactly(self, step: int) -> bool:
        return step <= self.freeze_step

    @torch.no_grad()
    def reduce(self, grads: Tensor, state: dict[str, Tensor], *, replicas: Replicas, step: int) -> None:
        """Bring the first moment, the fresh second moment and its ratio up to date on all replicas.

        `grads` becomes the gradient that the first moment stands for.
        """
        momentum, frozen, fresh = (state[name] for name in self.state_names)
        beta1, beta2, eps = self.lamb.beta1, self.lamb.beta2, self.lamb.eps
        if step == self.freeze_step + 1:
            fresh.copy_(frozen)
            state["factor"].fill_(1.0)
        live = frozen > 0
        kept = momentum.mul(beta1)
        momentum.copy_(kept).add_(grads, alpha=(1.0 - beta1) * replicas.group.size)
        compressed_mean(momentum, live, replicas)
        torch.sub(momentum, kept, out=grads).div_(1.0 - beta1)
        fresh.mul_(beta2).addcmul_(grads, grads, value=1.0 - beta2)
        ratio = torch.div(frozen.sqrt().add_(eps), fresh.sqrt().add_(eps)).mul_(live)
        largest = ratio.new_zeros(len(replicas.spans), 1, dtype=torch.float64)
        for row, (start, stop) in zip(largest, replicas.spans, strict=True):
            if start < stop:
                row.copy_(ratio[start:stop].max())
        replicas.over_slices(largest, "max")
        state["variance_ratio"].copy_(largest.view(-1))

    def prepare(self, pieces: Pieces) -> Iterator[tuple[Tensor, ...]]:
        if self.sums_exactly(pieces.step):
            for weight, update in self.lamb.prepare(self._exact(pieces)):
                yield weight, update, torch.zeros_like(update)
            return
        pieces.check(self.state_names, self.needs.scalars)
        for param, state, decay in zip(pieces.params, pieces.states, pieces.weight_decays, strict=True):
            undecayed = self._direction(state, pieces.step)
            yield torch.zeros_like(undecayed[:0]), undecayed.add(param, alpha=decay), undecayed

    @torch.no_grad()
    def step(self, pieces: Pieces, lr: float, norms: Sequence[Tensor], exempt: Sequence[bool]) -> None:
        pieces.check(self.state_names, self.needs.scalars)
        step = pieces.step
        if not pieces.params:
            return
        if self.sums_exactly(step):
            decayed = [norm[:2] for norm in norms]
            self.lamb.step(self._exact(pieces), lr, decayed, exempt)
            for state, ratio in zip(pieces.states, self.lamb.ratios(decayed, exempt), strict=True):
                begun = 1.0 - self.coeff_beta if step > 1 else 1.0
                state["coefficient"].lerp_(ratio.to(torch.float32), begun)
            return
        if self.lamb.bias_correction == "rate":
            first, second = self._corrections(step)
            lr *= math.sqrt(second) / first
        lists = (pieces.params, pieces.states, pieces.weight_decays, norms)
        for param, state, decay, (_, update, undecayed) in zip(*lists, strict=True):
            factor = self._factor(state, update, undecayed)
            move = self._direction(state, step).add_(param, alpha=decay)
            param.sub_(move.mul_(lr * state["coefficient"] * factor))
            state["factor"].copy_(factor)

    def _factor(self, state: dict[str, Tensor], update: Tensor, undecayed: Tensor) -> Tensor:
        share = torch.where(update > 0, (undecayed / update).clamp(max=1.0), 1.0).to(torch.float32)
        factor = state["variance_ratio"] * share + (1.0 - share)
        last, change = state["factor"], self.factor_threshold
        near = torch.minimum(torch.maximum(factor, last * (1.0 - change)), last * (1.0 + change))
        return near.clamp(self.factor_min, self.factor_max)

    def _direction(self, state: dict[str, Tensor], step: int) -> Tensor:
        """The update without decay."""
        first, second = self._corrections(step) if self.lamb.bias_correction == "moments" else (1.0, 1.0)
        root = state["exp_avg_sq"].sqrt().div_(math.sqrt(second)).add_(self.lamb.eps)
        return torch.div(state["exp_avg"], root, out=root).div_(first)

    def _corrections(self, step: int) -> tuple[float, float]:
        """The divisors that correct the bias of the two moments."""
        return 1.0 - self.lamb.beta1**step, 1.0 - self.lamb.beta2 ** min(step, self.freeze_step)

    def _exact(self, pieces: Pieces) -> Pieces:
        """The pieces as `lamb` takes them."""
        moments = [{name: state[name] for name in self.lamb.state_names} for state in pieces.states]
        return replace(pieces, states=moments)
