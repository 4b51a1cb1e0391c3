"""LAMB, which needs norms of whole parameters: the length of an update follows the length of the weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from megazero.ops.lamb import LambMoments, LambTerms, lamb_move, lamb_norms
from megazero.optim.rule import Needs, NormRule, Pieces


@dataclass(frozen=True)
class Lamb(NormRule):
    """LAMB (You et al. 2020, "Large Batch Optimization for Deep Learning", algorithm 2).

    ``u = m' / (sqrt(v') + eps) + wd p``, with Adam's moments m and v, and ``p = p - lr c u``, where the trust
    ratio c is ``|p| / |u|`` over the whole parameter, kept within bounds; it is 1 where either norm is 0.

    Attributes:
        beta1, beta2: decays of the moments.
        eps: added to the root of the second moment.
        min_coeff, max_coeff: bounds of the trust ratio (DeepSpeed's; the paper and NVIDIA's apex have none).
        bias_correction: ``moments`` divides m by 1 - b1^t and v by 1 - b2^t before the norm is taken, as the
            paper and apex do. ``rate`` multiplies the learning rate by sqrt(1 - b2^t) / (1 - b1^t) instead,
            as DeepSpeed's FusedLamb does: this also shortens the first thousand steps, up to sixfold, which
            the trust ratio would otherwise make up for. ``none`` does neither.
        adapt_all: scale the updates of parameters that are exempt from weight decay (norms and biases) too,
            as DeepSpeed does, and apex with `use_nvlamb`. Otherwise their trust ratio is 1, as in the
            authors' implementation and by default in apex: biases start at zero, so that the ratio would
            hold them there.
    """

    needs: ClassVar[Needs] = Needs(norms=("weight", "update"), one_pass=True)
    state_names: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    min_coeff: float = 0.01
    max_coeff: float = 10.0
    bias_correction: Literal["moments", "rate", "none"] = "moments"
    adapt_all: bool = False

    def prepare(self, pieces: Pieces) -> Iterator[tuple[Tensor, Tensor]]:
        """Update the moments and yield for each piece, instead of weights and update, their norms.

        A scalar has its own norm, and nothing of a piece's size is needed.
        """
        pieces.check(self.state_names)
        first, second = map(pieces.of, self.state_names)
        measured = lamb_norms(
            pieces.params,
            pieces.grads,
            first,
            second,
            pieces.weight_decays,
            LambMoments(self.beta1, self.beta2, pieces.scale),
            self._terms(pieces.step),
        )
        for norms in measured:
            weight, update = norms.unbind()
            yield weight, update

    @torch.no_grad()
    def step(self, pieces: Pieces, lr: float, norms: Sequence[Tensor], exempt: Sequence[bool]) -> None:
        pieces.check(self.state_names)
        if not pieces.params:
            return
        if self.bias_correction == "rate":
            lr *= self._correction(pieces.step)
        rates = (lr * self.ratios(norms, exempt)).to(torch.float32).unbind()
        first, second = map(pieces.of, self.state_names)
        terms = self._terms(pieces.step)
        lamb_move(pieces.params, first, second, rates, pieces.weights, pieces.weight_decays, terms)

    def ratios(self, norms: Sequence[Tensor], exempt: Sequence[bool]) -> Tensor:
        """The trust ratio of each piece, fp64 [pieces], from the arguments of `step`."""
        weight, update = torch.stack(list(norms)).unbind(1)
        bounded = (weight / update).clamp(self.min_coeff, self.max_coeff)
        plain = [unscaled and not self.adapt_all for unscaled in exempt]
        scaled = (weight > 0) & (update > 0) & ~torch.tensor(plain, device=weight.device)
        return torch.where(scaled, bounded, 1.0)

    def _terms(self, step: int) -> LambTerms:
        """The factor and epsilon with which moments that have a bias give the update of those without it."""
        if self.bias_correction != "moments":
            return LambTerms(1.0, self.eps)
        return LambTerms(self._correction(step), self.eps * math.sqrt(1.0 - self.beta2**step))

    def _correction(self, step: int) -> float:
        return math.sqrt(1.0 - self.beta2**step) / (1.0 - self.beta1**step)
