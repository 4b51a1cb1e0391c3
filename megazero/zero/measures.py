"""`Measures`: norms and counts over the state of the whole model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from megazero.mpu.context import ParallelContext
from megazero.mpu.host import on_device, read_values
from megazero.optim.grad_norm import local_square_sum
from megazero.zero.bucket import Bucket
from megazero.zero.layout import counted_parts, present_parts
from megazero.zero.norms import ParameterNorms
from megazero.zero.store.store import GRADIENT, WEIGHT, Store


class Measures:
    """Measures masters and gradient sums. Every rank makes each call and gets the same result.

    Args:
        store: keeps the state.
        trained: its buckets that are trained.
        context: all ranks.
    """

    def __init__(self, store: Store, trained: Sequence[Bucket], context: ParallelContext):
        self.store = store
        self.context = context
        self._trained = trained
        self._counted = {bucket: counted_parts(bucket.layout) for bucket in trained}

    @torch.no_grad()
    def gradient_norms(self) -> dict[str, float]:
        """L2 norm of the gradient sums of each trained parameter of this stage, by its global name."""
        norms = ParameterNorms(self._trained, self.context, 1)
        for loaded_buckets in self.store.stream((GRADIENT,), self._trained):
            for loaded in loaded_buckets:
                for number, _, piece in loaded.bucket.layout.member_pieces(loaded.flats[GRADIENT]):
                    norms.add(loaded.bucket, number, [as_used(loaded.bucket, piece)])
        norms.reduce()
        members = [(b, i, spec.name) for b in self._trained for i, spec in enumerate(b.layout.specs)]
        values = torch.cat([norms.of(bucket, number) for bucket, number, _ in members]).tolist()
        return {name: value for (_, _, name), value in zip(members, values, strict=True)}

    def params_norm(self) -> float:
        """Global L2 norm of the master weights of trained parameters; the same on all ranks."""
        return math.sqrt(read_total(self.squares(WEIGHT)))

    def count_zero_grads(self) -> int:
        """Count the gradient elements of the whole model that are exactly zero; padding does not count."""

        def zeros(pieces: Iterable[Tensor]) -> Tensor:
            counts = [piece.numel() - piece.count_nonzero() for piece in pieces]
            return torch.stack(counts).sum().double()

        present = {bucket: present_parts(bucket.layout) for bucket in self._trained}
        return round(read_total(self._total(GRADIENT, zeros, present)))

    def squares(self, kind: str, *, estimates: bool = False) -> Tensor:
        """The sum of the squares of masters or gradient sums, fp64 []; `estimates` is as for `_total`."""
        measure = lambda pieces: local_square_sum(pieces, self.context.device)  # noqa: E731
        return self._total(kind, measure, degree=2, estimates=estimates)

    @torch.no_grad()
    def _total(
        self,
        kind: str,
        measure: Callable[[Iterable[Tensor]], Tensor],
        parts: Mapping[Bucket, Sequence[slice]] | None = None,
        *,
        degree: int = 0,
        estimates: bool = False,
    ) -> Tensor:
        """The sum of a measure of a kind over the elements of the whole model, each counted once; fp64 [].

        One sum over the world is enough: elements that n ranks hold whole count as one n-th on each.

        Args:
            kind: the kind of state.
            measure: takes the pieces of some buckets, one after another.
            parts: where this rank's pieces of each bucket are; by default, with padding, which is zero.
            degree: the power of the factor of gradients by which the measure grows.
            estimates: whether each replica's own gradients, a fraction of the whole, are measured as an
                estimate: their squares then count n times, not one n-th.
        """
        parts = self._counted if parts is None else parts
        alike: dict[tuple[int, float], list[Bucket]] = {}
        for bucket in self._trained:
            layout = bucket.layout
            if parts[bucket]:
                copies = 1 if layout.row.shard_state else layout.ranks
                factor = bucket.sums_scale**degree if kind == GRADIENT else 1.0
                alike.setdefault((copies, factor), []).append(bucket)
        total = torch.zeros((), dtype=torch.float64, device=self.context.device)
        for (copies, factor), buckets in alike.items():
            pieces = (
                loaded.flats[kind][where]
                for loaded_buckets in self.store.stream((kind,), buckets)
                for loaded in loaded_buckets
                for where in parts[loaded.bucket]
            )
            # A visit's tensors are gone after it, if they come from other memory.
            measured = factor * measure(pieces if self.store.tiers else list(pieces))
            total += on_device(measured * copies if estimates else measured / copies, total.device)
        self.context.world.all_reduce(total).wait()
        return total


def read_total(total: Tensor) -> float:
    """A total on the host; NaN on the meta device."""
    (value,) = read_values(total) or (math.nan,)
    return value


def as_used(bucket: Bucket, sums: Tensor) -> Tensor:
    """Apply the factor of the last update to gradient sums that it read without scaling them."""
    return sums if bucket.sums_scale == 1.0 else sums * bucket.sums_scale
