"""What the sweeps of the optimizers' kernels share: pieces of every kind, and judges of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from megazero.ops.segments import DeviceSignals
from tests.kernels.harness import DTYPES, Bound, in_every_order, same_bits

# Sizes of segments: every remainder of a pack, none at all, and more than a chunk of 4,096.
SIZES = (*range(1, 10), 0, 63, 257, 1030, 4095, 4099)
# Numbers at the edges of fp32; the gradients of the same places are at those of their dtype.
EXTREMES = (0.0, -0.0, 1e-45, -1e-39, 1.5, -3e38, 1e20, float("inf"), float("-inf"), float("nan"))


@dataclass
class Pieces:
    """Masters, gradients, moments and weights of several segments."""

    params: list[Tensor]
    grads: list[Tensor]
    moments: list[list[Tensor]]
    weights: list[Tensor | None] | None

    def clone(self) -> Pieces:
        """The same numbers at other addresses, misaligned as they were."""

        def copy(tensors):
            return None if tensors is None else [None if each is None else moved(each) for each in tensors]

        return Pieces(
            copy(self.params), copy(self.grads), [copy(each) for each in self.moments], copy(self.weights)
        )

    def changed(self) -> list[Tensor | None]:
        """All that a step may change."""
        return [*self.params, *(each for kind in self.moments for each in kind), *(self.weights or [])]


def moved(tensor: Tensor) -> Tensor:
    """A copy that is as far from a multiple of 16 bytes as the tensor."""
    lead = tensor.data_ptr() % 16 // tensor.element_size()
    return torch.cat([tensor.new_zeros(lead), tensor])[lead:]


def shifted(tensor: Tensor, lead: int) -> Tensor:
    """A copy `lead` elements behind a multiple of 16 bytes."""
    return torch.cat([tensor.new_zeros(lead), tensor])[lead:]


def pieces(
    sizes: Sequence[int], kinds: int, grad_dtype: torch.dtype, weight_dtype: torch.dtype | None, seed: int = 0
) -> Pieces:
    """Random pieces: every second begins within a pack, every third's buffers differ in where.

    The last of `kinds` moments is not negative, as sums of squares are.
    """
    g = torch.Generator().manual_seed(seed)

    def drawn(buffer: int, dtype: torch.dtype, square: bool = False) -> list[Tensor]:
        found = []
        for number, size in enumerate(sizes):
            values = torch.randn(size, generator=g)
            lead = number % 4 if number % 2 else 0
            lead += buffer % 4 if number % 3 == 2 else 0
            found.append(shifted((values.square() if square else values).to(dtype), lead))
        return found

    moments = [drawn(2 + kind, torch.float32, square=kind == kinds - 1) for kind in range(kinds)]
    weights = None if weight_dtype is None else drawn(4, weight_dtype)
    return Pieces(drawn(0, torch.float32), drawn(1, grad_dtype), moments, weights)


def extreme_pieces(kinds: int, grad_dtype: torch.dtype) -> Pieces:
    """One piece in which all pairs of extremes meet, as masters and gradients."""
    values = torch.tensor(EXTREMES)
    params, grads = values.repeat_interleave(len(values)), values.repeat(len(values)).to(grad_dtype)
    moments = [torch.full_like(params, 0.25 * kind) for kind in range(kinds)]
    return Pieces([params], [grads], [[each] for each in moments], [torch.empty_like(params).half()])


Step = Callable[..., None]


def check_step(step: Step, reference: Step, start: Pieces, units: float) -> None:
    """In every order of threads, the kernel's step is the reference's in fp64; weights are masters rounded.

    Args:
        step: of pieces, with the library as `kernels`.
        reference: of pieces, without.
        start: left as it is.
        units: the bound, in units of the largest of a masters' terms.
    """

    def run(kernels):
        own = start.clone()
        step(own, kernels=kernels)
        return own.changed()

    found = in_every_order(run)
    exact = start.clone()
    exact.params, exact.grads = ([each.double() for each in kind] for kind in (exact.params, exact.grads))
    exact.moments = [[each.double() for each in kind] for kind in exact.moments]
    exact.weights = None
    reference(exact)
    floors = [
        (p.abs() + 1).double().maximum(g.double().abs())
        for p, g in zip(start.params, start.grads, strict=True)
    ]
    kinds = 1 + len(start.moments)
    for number, (ours, true) in enumerate(zip(found[: kinds * len(floors)], exact.changed(), strict=True)):
        assert Bound(units, floors[number % len(floors)]).holds(ours, true), number
    for master, weight in zip(found, found[kinds * len(floors) :], strict=False):
        assert weight is None or same_bits(weight, master.to(weight.dtype))


def check_extremes(step: Step, reference: Step, kinds: int) -> None:
    """Infinities, NaN and denormals come out as from fp32 arithmetic by the reference."""
    for dtype in DTYPES:
        start = extreme_pieces(kinds, dtype)

        def run(kernels, start=start):
            own = start.clone()
            step(own, kernels=kernels)
            return own.changed()

        found = in_every_order(run)
        true = start.clone()
        reference(true)
        for ours, theirs in zip(found[: 1 + kinds], true.changed(), strict=False):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-30, equal_nan=True)
        plain = found[0].half().isnan()
        assert torch.equal(found[-1].isnan(), plain)
        assert torch.equal(found[-1][~plain], found[0].half()[~plain])


def check_cuts(step: Step, whole: Pieces, cuts: Sequence[int]) -> None:
    """A segment cut at `cuts`, into views of the same memory, has the same bits as in one piece."""

    def cut(tensors: list[Tensor]) -> list[Tensor]:
        edges = [0, *cuts, tensors[0].numel()]
        return [tensors[0][a:b] for a, b in pairwise(edges)]

    def run(kernels):
        one, several = whole.clone(), whole.clone()
        step(one, kernels=kernels)
        views = Pieces(
            cut(several.params),
            cut(several.grads),
            [cut(each) for each in several.moments],
            cut(several.weights),
        )
        step(views, kernels=kernels)
        for a, b in zip(one.changed(), several.changed(), strict=True):
            assert same_bits(a, b)
        return one.changed()

    in_every_order(run)


def check_signals(step: Step, start: Pieces) -> None:
    """A factor on the device stands for one of the host; a step with an overflow changes nothing."""

    def run(kernels):
        by_host, by_device, skipped = start.clone(), start.clone(), start.clone()
        step(by_host, scale=0.125, kernels=kernels)
        step(
            by_device, scale=0.5, signals=DeviceSignals(torch.tensor([0.25]), torch.zeros(1)), kernels=kernels
        )
        step(skipped, signals=DeviceSignals(None, torch.ones(1)), kernels=kernels)
        for a, b in zip(by_host.changed(), by_device.changed(), strict=True):
            assert same_bits(a, b)
        for a, b in zip(start.changed(), skipped.changed(), strict=True):
            assert same_bits(a, b)
        return by_host.changed()

    in_every_order(run)
