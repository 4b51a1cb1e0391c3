"""The optimizer step over buckets: norm, clipping, skipping, update, and the way back to the weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megazero.mpu import ParallelContext, ParamSpec, gather_values
from megazero.optim import UpdateRule, clip_coefficient, local_square_sum
from megazero.zero.bucket import Bucket, Segment

PerGroup = float | Sequence[float]


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
    """Updates master weights (Micikevicius et al. 2018) over flat buckets: whole, or this rank's shards.

    Moments are fp32. Masters of a narrower dtype are updated in fp32 and rounded.

    Args:
        buckets: the model's parameters and gradient sums.
        rule: how a flat piece moves.
        context: for the norm, which spans all ranks.
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
        self.states = [rule.init_state(b.master.float()) if b.key.trainable else {} for b in self.buckets]

    @torch.no_grad()
    def step(self, lr: PerGroup, weight_decay: PerGroup, grad_scale: float = 1.0) -> StepReport:
        """Update the model from the buckets' gradient sums, which become what the update used.

        Args:
            lr: learning rate; one, or one per parameter group.
            weight_decay: of the parameters that decay; likewise.
            grad_scale: what the sums are to be multiplied by first (loss unscaling and averaging).

        Returns:
            The report, the same on all ranks.
        """
        norm = self.grad_norm() * grad_scale
        if not math.isfinite(norm):
            return StepReport(norm, False, self._first_bad_parameter())
        factor = grad_scale * clip_coefficient(norm, self.clip_grad)
        self.updates += 1
        update = _Update(self.rule, self.updates, lr, weight_decay)
        fp32 = torch.float32
        for bucket, state in self._trained():
            grads, master = bucket.own_grads, bucket.master
            if grads.dtype == master.dtype == fp32:
                if factor != 1.0:
                    grads.mul_(factor)
                update.add(bucket, master, grads, state)
                continue
            wide, wide_grads = master.to(fp32), grads.to(fp32, copy=True).mul_(factor)
            alone = _Update(self.rule, self.updates, lr, weight_decay)
            alone.add(bucket, wide, wide_grads, state)
            alone.run()
            grads.copy_(wide_grads)
            if wide is not master:
                master.copy_(wide)
        update.run()
        self.publish()
        return StepReport(norm, True)

    @torch.no_grad()
    def publish(self) -> None:
        """Bring the masters to the model's weights, on every rank."""
        for work in [bucket.publish() for bucket in self.buckets]:
            work.wait()

    def grad_norm(self) -> float:
        """Global L2 norm of the gradient sums; the same on all ranks."""
        return self._norm([b.own_grads for b, _ in self._trained()])

    def params_norm(self) -> float:
        """Global L2 norm of the master weights of trained parameters; the same on all ranks."""
        return self._norm([b.master for b, _ in self._trained()])

    @torch.no_grad()
    def count_zero_grads(self) -> int:
        """How many gradient elements of the whole model are exactly zero."""

        def zeros(pieces: list[Tensor]) -> Tensor:
            counts = [piece.numel() - piece.count_nonzero() for piece in pieces]
            return torch.stack(counts).sum().double()

        return round(self._total([b.own_grads for b, _ in self._trained()], zeros))

    @torch.no_grad()
    def full_state(self) -> Iterator[tuple[ParamSpec, dict[str, Tensor]]]:
        """Each parameter's master weight and moments, whole over the data-parallel ranks.

        All ranks iterate to the end. One bucket at a time is whole; tensors may be views of live state.

        Yields:
            ``spec, {"weight": ..., "exp_avg": ...}``, tensors in the shape of this tensor-parallel slice;
            of a parameter that is not trained the weight alone.
        """
        for bucket, state in zip(self.buckets, self.states, strict=True):
            kinds = {"weight": bucket.master, **state}
            views = {kind: bucket.views(bucket.gather_state(flat)) for kind, flat in kinds.items()}
            for i, spec in enumerate(bucket.specs):
                yield spec, {kind: parts[i] for kind, parts in views.items()}

    @torch.no_grad()
    def full_gradients(self) -> Iterator[tuple[ParamSpec, Tensor]]:
        """Each trained parameter's gradient sum, as `full_state` does; until the next step starts."""
        for bucket, _ in self._trained():
            whole = bucket.gather_state(bucket.own_grads)
            yield from zip(bucket.specs, bucket.views(whole), strict=True)

    @torch.no_grad()
    def load(self, tensor_of: Callable[[ParamSpec, str], Tensor], kinds: Sequence[str]) -> None:
        """Take over saved state; `publish` then brings it to the weights.

        Args:
            tensor_of: the whole tensor of a parameter (of this tensor-parallel slice) by kind; asked only
                for parameters of which this rank holds a part.
            kinds: of ``weight`` and the rule's state names.
        """
        for bucket, state in zip(self.buckets, self.states, strict=True):
            mine = {"weight": bucket.master, **state}
            for kind in kinds:
                if kind not in mine:  # moments of parameters that are not trained
                    continue
                for spec, span, piece in bucket.named_pieces(mine[kind]):
                    piece.copy_(tensor_of(spec, kind).reshape(-1)[span])

    def _trained(self) -> list[tuple[Bucket, dict[str, Tensor]]]:
        pairs = zip(self.buckets, self.states, strict=True)
        return [(bucket, state) for bucket, state in pairs if bucket.key.trainable]

    def _norm(self, flats: Sequence[Tensor]) -> float:
        device = self.context.device
        return math.sqrt(self._total(flats, lambda pieces: local_square_sum(pieces, device)))

    def _total(self, flats: Sequence[Tensor], measure: Callable[[list[Tensor]], Tensor]) -> float:
        """The sum of a measure over the elements of the whole model, each counted once.

        One sum over the world serves all: what several ranks hold whole counts as that much less on each.
        """
        pieces: dict[int, list[Tensor]] = {}
        for (bucket, _), flat in zip(self._trained(), flats, strict=True):
            copies = 1 if bucket.row.shard_state else bucket.group.size
            found = [piece for segment, piece in bucket.pieces(flat) if segment.counted]
            if found:
                pieces.setdefault(copies, []).extend(found)
        total = torch.zeros((), dtype=torch.float64, device=self.context.device)
        for copies, found in pieces.items():
            total += measure(found) / copies
        self.context.world.all_reduce(total).wait()
        return float(total)

    def _first_bad_parameter(self) -> str:
        named = (each for b, _ in self._trained() for each in b.named_pieces(b.own_grads))
        mine = next((spec.name for spec, _, grad in named if not grad.isfinite().all()), None)
        found = gather_values(self.context.world, mine, self.context.device)
        rank, name = next(((r, n) for r, n in enumerate(found) if n is not None), (None, None))
        return f"{name} (rank {rank})" if name else "none: the sum of squares overflowed"


class _Update:
    """Pieces that one call of the rule updates, by learning rate."""

    def __init__(self, rule: UpdateRule, number: int, lr: PerGroup, weight_decay: PerGroup):
        self._rule = rule
        self._number = number
        self._lr = lr
        self._weight_decay = weight_decay
        self._calls: dict[float, list[tuple[Tensor, Tensor, dict[str, Tensor], float]]] = {}

    def add(self, bucket: Bucket, master: Tensor, grads: Tensor, state: dict[str, Tensor]) -> None:
        """Add a bucket's segments."""
        parts = {kind: [piece for _, piece in bucket.pieces(flat)] for kind, flat in state.items()}
        pairs = zip(bucket.pieces(master), bucket.pieces(grads), strict=True)
        for i, ((segment, weights), (_, gradient)) in enumerate(pairs):
            decay = _of_group(self._weight_decay, segment) if segment.weight_decay else 0.0
            mine = {kind: pieces[i] for kind, pieces in parts.items()}
            call = self._calls.setdefault(_of_group(self._lr, segment), [])
            call.append((weights, gradient, mine, decay))

    def run(self) -> None:
        """Update them."""
        for lr, pieces in self._calls.items():
            weights, gradients, states, decays = zip(*pieces, strict=True)
            self._rule.step(weights, gradients, states, step=self._number, lr=lr, weight_decays=list(decays))


def _of_group(value: PerGroup, segment: Segment) -> float:
    return value if isinstance(value, (int, float)) else value[segment.group]
