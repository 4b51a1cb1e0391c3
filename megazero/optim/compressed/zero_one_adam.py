"""0/1 Adam: the second moment is updated less and less often, and then replicas exchange less often."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import ClassVar

import torch
from torch import Tensor

from megazero.errors import ConfigError
from megazero.optim.compressed.mean import compressed_mean
from megazero.optim.rule import LocalRule, Needs, Pieces, Replicas


@dataclass(frozen=True)
class ZeroOneSteps:
    """Which updates of 0/1 Adam change the variance, and which exchange the replicas' own moves.

    Attributes:
        var_freeze_step: number of updates after which v stays as it is.
        var_update_scaler: the number of updates of v after which the interval between them doubles.
        local_step_scaler: the number of updates after which the interval between exchanges doubles.
        local_step_clipper: the longest interval between exchanges; with 1 every update exchanges.

    Raises:
        ConfigError: one of them is below 1.
    """

    var_freeze_step: int
    var_update_scaler: int = 16
    local_step_scaler: int = 32678
    local_step_clipper: int = 16

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value < 1:
                raise ConfigError(f"`{name}` must be at least 1, but is {value}; choose a number of steps")

    def updates_variance(self, step: int) -> bool:
        """Whether update number `step` updates v: the first one does, and then the distance from one to the
        next, 1 at first, doubles after `var_update_scaler` of them.
        """
        if step > self.var_freeze_step:
            return False
        return self.variance_updates(step) > self.variance_updates(step - 1)

    def exchanges(self, step: int) -> bool:
        """Whether update number `step` of those after the freeze ends with an exchange."""
        alone = step - self.var_freeze_step
        doublings = min((alone - 1) // self.local_step_scaler, self.local_step_clipper.bit_length())
        return alone % min(1 << doublings, self.local_step_clipper) == 0

    def variance_updates(self, step: int) -> int:
        """The number of updates of v in the first `step` updates, if it is not frozen before."""
        if step < 1:
            return 0
        scaler = self.var_update_scaler
        # After `scaler` updates at each of the distances 1, 2, ..., 2^(d - 1), the next is at distance 2^d.
        doublings = ((step - 1) // scaler + 1).bit_length() - 1
        since = step - 1 - scaler * ((1 << doublings) - 1)
        return scaler * doublings + (since >> doublings) + 1


@dataclass(frozen=True)
class ZeroOneAdam(LocalRule):
    """0/1 Adam (Lu et al. 2022, "Maximizing Communication Efficiency for Large-scale Training via 0/1 Adam").

    For `steps.var_freeze_step` updates, gradients are summed exactly in those that update v, and both
    moments are updated; in the others only the first, by the compressed mean of the gradients. Then v
    stays as it is and each replica goes on alone: it moves its weights by its own first moment, and collects
    in u what it moved by, ``sum lr m'``. In the updates that exchange, the replicas go on together
    from where they were last together: ``u = C(u)``, ``m = u / sum lr``, ``p = p - u / (sqrt(v') + eps)``.

    The masters are the weights that the replicas have in common; u is the way from these to those in use.
    Weight decay shrinks the masters in every update, so none of it gets into m (in DeepSpeed it does). As in
    `OnebitAdam`, nothing moves that has no second moment.

    Attributes:
        steps: which updates do what.
        beta1, beta2, eps: as Adam's; m is divided by 1 - b1^t, and v by 1 - b2^k if it was updated k times.
        precondition, corrects: as in `OnebitAdam`.
    """

    needs: ClassVar[Needs] = Needs(
        reduces=True, private=("exp_avg", "local_update"), scalars=("lr_sum",), in_use=True
    )
    state_names: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq", "local_update")

    steps: ZeroOneSteps
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    precondition: bool = True
    corrects: bool = True

    def sums_exactly(self, step: int) -> bool:
        return self.steps.updates_variance(step)

    @torch.no_grad()
    def reduce(self, grads: Tensor, state: dict[str, Tensor], *, replicas: Replicas, step: int) -> None:
        """Bring the gradients to all replicas, or the first moments, or nothing, depending on the step."""
        live = state["exp_avg_sq"] > 0
        grads.mul_(replicas.group.size)  # the mean of these is the whole gradient
        units = self._roots(state["exp_avg_sq"], step) if self.precondition else None
        if step <= self.steps.var_freeze_step:
            compressed_mean(grads, live, replicas, units)
            return
        if step == self.steps.var_freeze_step + 1:  # errors of gradients must not be added to moments
            replicas.worker_error.zero_()
            replicas.server_error.zero_()
        momentum, update, lr_sum = state["exp_avg"], state["local_update"], state["lr_sum"]
        momentum.lerp_(grads, 1.0 - self.beta1).mul_(live)
        rates = [lr / self._corrections(step)[0] for lr in replicas.lrs]
        for (start, stop), rate in zip(replicas.spans, rates, strict=True):
            update[start:stop].add_(momentum[start:stop], alpha=rate)
        lr_sum.add_(torch.tensor(rates, dtype=lr_sum.dtype, device=lr_sum.device))
        if self.steps.exchanges(step):
            compressed_mean(update, live, replicas, units)
            _share(momentum, update, lr_sum, replicas.spans)

    @torch.no_grad()
    def step(self, pieces: Pieces, lr: float) -> None:
        pieces.check(self.state_names)
        step = pieces.step
        alone = step > self.steps.var_freeze_step
        if alone and not self.steps.exchanges(step):
            lr_of_moments = 0.0
        else:
            lr_of_moments = 1.0 if alone else lr / self._corrections(step)[0]
        lists = (pieces.params, pieces.grads, pieces.states, pieces.weight_decays)
        for param, grad, state, decay in zip(*lists, strict=True):
            if not alone:
                state["exp_avg"].lerp_(grad, 1.0 - self.beta1)
                if self.steps.updates_variance(step):
                    state["exp_avg_sq"].mul_(self.beta2).addcmul_(grad, grad, value=1.0 - self.beta2)
            param.mul_(1.0 - lr * decay)
            if lr_of_moments:
                moved = state["local_update"] if alone else state["exp_avg"]
                param.addcdiv_(moved, self._roots(state["exp_avg_sq"], step), value=-lr_of_moments)
            if alone and lr_of_moments:
                state["local_update"].zero_()

    def in_use(self, master: Tensor, state: dict[str, Tensor]) -> Tensor:
        """The masters and this replica's own moves since."""
        roots = self._roots(state["exp_avg_sq"], self.steps.var_freeze_step)
        return torch.addcdiv(master, state["local_update"], roots, value=-1.0)

    def _roots(self, variance: Tensor, step: int) -> Tensor:
        return variance.sqrt().div_(math.sqrt(self._corrections(step)[1])).add_(self.eps)

    def _corrections(self, step: int) -> tuple[float, float]:
        """The divisors of the two moments."""
        if not self.corrects:
            return 1.0, 1.0
        updates = self.steps.variance_updates(min(step, self.steps.var_freeze_step))
        return 1.0 - self.beta1**step, 1.0 - self.beta2**updates


def _share(momentum: Tensor, update: Tensor, lr_sum: Tensor, spans: Sequence[tuple[int, int]]) -> None:
    """``m = u / sum lr`` where the sum is above 0; the sums begin anew."""
    for total, (start, stop) in zip(lr_sum, spans, strict=True):
        piece = momentum[start:stop]
        piece.copy_(torch.where(total > 0, update[start:stop] / total, piece))
    lr_sum.zero_()
