"""LAMB, which needs norms of whole parameters: the length of an update follows the length of the weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from megazero.ops.lamb import lamb_move_all, lamb_norms_of_all
from megazero.optim.rule import Needs, NormRule, PassEnds, check_pieces, zeros_like


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

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    min_coeff: float = 0.01
    max_coeff: float = 10.0
    bias_correction: Literal["moments", "rate", "none"] = "moments"
    adapt_all: bool = False

    @property
    def state_names(self) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq")

    def init_state(self, like: Tensor) -> dict[str, Tensor]:
        return zeros_like(self.state_names, like)

    def prepare(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        states: Sequence[dict[str, Tensor]],
        *,
        step: int,
        weight_decays: Sequence[float],
        ends: PassEnds | None = None,
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Update the moments and yield for each piece, instead of weights and update, their norms.

        A scalar has its own norm, and nothing of a piece's size is needed.
        """
        ends = check_pieces(self.state_names, params, grads, states, step, weight_decays, ends)
        facts = {"beta1": self.beta1, "beta2": self.beta2, **self._terms(step), "scale": ends.scale}
        first, second = self._moments(states)
        for norms in lamb_norms_of_all(params, grads, first, second, weight_decays=weight_decays, **facts):
            weight, update = norms.unbind()
            yield weight, update

    @torch.no_grad()
    def step(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        states: Sequence[dict[str, Tensor]],
        *,
        step: int,
        lr: float,
        weight_decays: Sequence[float],
        norms: Sequence[Tensor],
        exempt: Sequence[bool],
        ends: PassEnds | None = None,
    ) -> None:
        ends = check_pieces(self.state_names, params, grads, states, step, weight_decays, ends)
        if not params:
            return
        if self.bias_correction == "rate":
            lr *= _correction(self, step)
        rates = (lr * self.ratios(norms, exempt)).to(torch.float32).unbind()
        first, second = self._moments(states)
        terms = self._terms(step)
        lamb_move_all(params, first, second, rates, ends.weights, weight_decays=weight_decays, **terms)

    def ratios(self, norms: Sequence[Tensor], exempt: Sequence[bool]) -> Tensor:
        """The trust ratio of each piece, fp64 [pieces], from the arguments of `step`."""
        weight, update = torch.stack(list(norms)).unbind(1)
        bounded = (weight / update).clamp(self.min_coeff, self.max_coeff)
        plain = [unscaled and not self.adapt_all for unscaled in exempt]
        scaled = (weight > 0) & (update > 0) & ~torch.tensor(plain, device=weight.device)
        return torch.where(scaled, bounded, 1.0)

    def _moments(self, states: Sequence[dict[str, Tensor]]) -> list[list[Tensor]]:
        return [[state[name] for state in states] for name in self.state_names]

    def _terms(self, step: int) -> dict[str, float]:
        """The factor and epsilon with which moments that have a bias give the update of those without it."""
        if self.bias_correction != "moments":
            return {"factor": 1.0, "eps": self.eps}
        return {"factor": _correction(self, step), "eps": self.eps * math.sqrt(1.0 - self.beta2**step)}


def _correction(rule: Lamb, step: int) -> float:
    return math.sqrt(1.0 - rule.beta2**step) / (1.0 - rule.beta1**step)
