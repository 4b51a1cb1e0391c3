"""The optimizer step over buckets: norm, clipping, skipping, update, and the copy back to the model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megazero.mpu import ParallelContext, ParamSpec, gather_values
from megazero.optim import UpdateRule, clip_coefficient, local_square_sum
from megazero.zero.bucket import Bucket


@dataclass(frozen=True)
class StepReport:
    """What one optimizer step did.

    Attributes:
        grad_norm: global L2 norm before clipping, each parameter counted once; inf or nan when skipped.
        applied: False when a gradient was not finite anywhere, and no rank changed anything.
        first_bad_parameter: when skipped, the first parameter with such a gradient and the rank it is on.
    """

    grad_norm: float
    applied: bool
    first_bad_parameter: str | None = None


class Optimizer:
    """fp32 master weights and moments over flat buckets (Micikevicius et al. 2018 for the masters).

    Args:
        buckets: the model's parameters and gradient sums.
        rule: how a flat piece moves.
        context: for the norm, which spans all ranks of one model.
        clip_grad: largest gradient norm; 0 turns clipping off.
    """

    def __init__(
        self, buckets: Sequence[Bucket], rule: UpdateRule, context: ParallelContext, clip_grad: float
    ):
        self.buckets = list(buckets)
        self.rule = rule
        self.context = context
        self.clip_grad = clip_grad
        self.updates = 0
        # fp32 weights are their own masters.
        self.masters = [
            b.weights if b.key.dtype == torch.float32 else b.weights.float() for b in self.buckets
        ]
        self.states = [rule.init_state(master) for master in self.masters]

    @torch.no_grad()
    def step(self, lr: float, weight_decay: float, grad_scale: float = 1.0) -> StepReport:
        """Update the model from the buckets' gradient sums.

        Args:
            lr: learning rate.
            weight_decay: of the parameters that decay.
            grad_scale: what the sums are to be multiplied by first (loss unscaling and averaging).

        Returns:
            The report, the same on all ranks.
        """
        norm = self.grad_norm() * grad_scale
        if not math.isfinite(norm):
            return StepReport(norm, False, self._first_bad_parameter())
        factor = grad_scale * clip_coefficient(norm, self.clip_grad)
        if factor != 1.0:
            for bucket in self.buckets:
                bucket.grads.mul_(factor)
        self.updates += 1
        self.rule.step(
            self.masters,
            [b.grads for b in self.buckets],
            self.states,
            step=self.updates,
            lr=lr,
            weight_decays=[weight_decay if b.key.weight_decay else 0.0 for b in self.buckets],
        )
        self.publish()
        return StepReport(norm, True)

    @torch.no_grad()
    def publish(self) -> None:
        """Copy the masters to the model's weights."""
        for bucket, master in zip(self.buckets, self.masters, strict=True):
            if master is not bucket.weights:
                bucket.weights.copy_(master)

    def grad_norm(self) -> float:
        """Global L2 norm of the gradient sums; the same on all ranks."""
        return self._norm([b.grads for b in self.buckets])

    def params_norm(self) -> float:
        """Global L2 norm of the master weights; the same on all ranks."""
        return self._norm(self.masters)

    def count_zero_grads(self) -> int:
        """How many gradient elements of the whole model are exactly zero."""
        device = self.context.device
        zeros = torch.zeros((), dtype=torch.float64, device=device)
        for bucket in self._counted():
            zeros += bucket.numel - bucket.grads.count_nonzero()
        self.context.model.all_reduce(zeros).wait()
        return int(zeros)

    def named_state(self) -> Iterator[tuple[ParamSpec, dict[str, Tensor]]]:
        """Each parameter's master weight and moments, as views: ``{"weight": ..., "exp_avg": ...}``."""
        for bucket, master, state in zip(self.buckets, self.masters, self.states, strict=True):
            flats = {"weight": master, **state}
            views = {key: bucket.views(flat) for key, flat in flats.items()}
            for i, spec in enumerate(bucket.specs):
                yield spec, {key: parts[i] for key, parts in views.items()}

    def named_gradients(self) -> Iterator[tuple[ParamSpec, Tensor]]:
        """Each parameter's gradient sum, as a view."""
        for bucket in self.buckets:
            yield from bucket.named(bucket.grads)

    def _counted(self) -> list[Bucket]:
        """The buckets whose elements count on this rank in sums over the model."""
        first = self.context.tp.rank == 0
        return [b for b in self.buckets if b.key.sharded or first]

    def _norm(self, flats: Sequence[Tensor]) -> float:
        counted = {id(b) for b in self._counted()}
        mine = [flat for b, flat in zip(self.buckets, flats, strict=True) if id(b) in counted]
        total = local_square_sum(mine, self.context.device)
        self.context.model.all_reduce(total).wait()
        return math.sqrt(float(total))

    def _first_bad_parameter(self) -> str:
        mine = next((s.name for s, grad in self.named_gradients() if not grad.isfinite().all()), None)
        found = gather_values(self.context.world, mine, self.context.device)
        rank, name = next(((r, n) for r, n in enumerate(found) if n is not None), (None, None))
        return f"{name} (rank {rank})" if name else "none: the sum of squares overflowed"
