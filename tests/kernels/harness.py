"""What every kernel's sweep shares: the library for the CPU, and the comparison with a reference in fp64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megazero.kernels.build import build, on_cpu_recipe
from megazero.kernels.library import KernelLibrary
from megazero.kernels.on_cpu import ThreadOrder, WatchedLibrary
from megazero.ops.cuda import cuda_built, cuda_kernels

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Every remainder of packs, warps and blocks, and both sides of each change of shape.
WIDTHS = (
    *range(1, 36),
    *(63, 64, 65, 127, 129, 250, 251, 252, 253, 254, 255, 256, 257, 258, 260),
    *(511, 513, 1023, 1024, 1025, 1032, 2048, 2049, 4093, 4096, 4098, 4099),
)
# The spacing of numbers around 1.
EPSILON = {torch.float32: 2.0**-23, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
SMALLEST = {torch.float32: 2.0**-126, torch.float16: 2.0**-24, torch.bfloat16: 2.0**-126}


@cache
def library_path() -> Path:
    """The watched library, built from this checkout's sources once."""
    return build(on_cpu_recipe())


def watched(order: ThreadOrder = ThreadOrder.FORWARD, seed: int = 0) -> WatchedLibrary:
    """The kernels on the CPU, with counts and faults at zero."""
    library = WatchedLibrary(library_path(), order, seed)
    library.reset()
    return library


def assert_faultless(library: WatchedLibrary) -> None:
    """No kernel has raced, gone out of bounds, or reached a barrier alone."""
    report = library.report()
    assert report.faults == ()
    assert report.kernels
    assert {
        name: counts.mistakes.total for name, counts in report.kernels.items() if counts.mistakes.total
    } == {}


class Mirrored:
    """Kernels of another memory for tensors of this one: a launch copies what it is given there and back."""

    def __init__(self, library: KernelLibrary, device: str) -> None:
        self.library = library
        self.device = device
        self.column_groups = library.column_groups
        self.column_counters = library.column_counters

    def once(self, key: object, make: Callable[[], Any]) -> Any:
        return make()

    def launch(self, name: str, *arguments: Any) -> None:
        copies: dict[int, tuple[Tensor, Tensor]] = {}

        def mirror(argument: Any) -> Any:
            if isinstance(argument, (list, tuple)):
                return [mirror(each) for each in argument]
            if not isinstance(argument, Tensor):
                return argument
            whole = torch.empty(0, dtype=torch.uint8).set_(argument.untyped_storage())
            there = copies.setdefault(whole.data_ptr(), (whole, whole.to(self.device, copy=True)))[1]
            shape = argument.storage_offset(), argument.shape, argument.stride()
            return torch.empty(0, dtype=argument.dtype, device=self.device).set_(
                there.untyped_storage(), *shape
            )

        self.library.launch(name, *map(mirror, arguments))
        for here, there in copies.values():
            here.copy_(there)


def in_every_order(
    run: Callable[[KernelLibrary], Sequence[Tensor | None]], seed: int = 0
) -> list[Tensor | None]:
    """The results of `run`, which must be the same bits in whatever order threads take turns.

    Where there is a GPU, what is returned is what it computes.
    """
    results = []
    for order in ThreadOrder:
        library = watched(order, seed)
        results.append([None if each is None else each.detach().clone() for each in run(library)])
        assert_faultless(library)
    for other in results[1:]:
        for first, second in zip(results[0], other, strict=True):
            assert (first is None and second is None) or same_bits(first, second)
    if cuda_built():
        return [None if each is None else each.detach() for each in run(Mirrored(cuda_kernels(), "cuda"))]
    return results[0]


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same bytes, NaN included."""
    return a.dtype == b.dtype and torch.equal(
        a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)
    )


@dataclass(frozen=True)
class Bound:
    """How far a result may be from the fp64 reference: `units` of its dtype's spacing there, or at `floor`.

    `floor` is the magnitude of the numbers that were added up to make small results; a tensor broadcasts.
    """

    units: float
    floor: float | Tensor = 0.0

    def holds(self, result: Tensor, exact: Tensor) -> bool:
        """Whether result [..] is close to the fp64 tensor exact [..], infinities and NaN in the same places.

        A number that overflows result's dtype counts as that infinity.
        """
        wide = exact.to(result.dtype).double()
        special = ~wide.isfinite() | ~result.isfinite()
        # Next to the largest number, rounding decides between it and infinity.
        largest = torch.finfo(result.dtype).max
        edge = exact.abs() >= largest * (1 - 4 * EPSILON[result.dtype])
        same = (
            (wide == result.double())
            | (wide.isnan() & result.isnan())
            | (edge & ~exact.isnan() & ~result.isnan())
        )
        floor = torch.as_tensor(self.floor, dtype=torch.float64)
        allowed = (
            self.units * torch.maximum(exact.abs(), floor) * EPSILON[result.dtype] + SMALLEST[result.dtype]
        )
        close = (result.double() - exact).abs() <= allowed
        return bool(torch.where(special, same, close).all())
