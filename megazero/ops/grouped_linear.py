"""Products of groups of rows with a matrix each, as experts need them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from megazero.host_memory import sent_to
from megazero.ops.dispatch import CUDA, CallFacts, Implementation, Operator, kinds_of_calls, where
from megazero.ops.example import Example

_ALIGNED = 16  # bytes that torch's grouped product wants rows to be multiples of


@dataclass(frozen=True)
class Groups:
    """How rows are divided among groups, one group's after the other's.

    Attributes:
        rows: their number, R.
        count: the number of groups, E.
        device: the rows' device.
        sizes: how many rows each group has, on the host; None if the device alone knows.
        size: the rows of every group, where they are equal by design.
        on_device: int32 [E], the row behind the last one of each group; None if the host knows the sizes.
    """

    rows: int
    count: int
    device: torch.device
    sizes: Sequence[int] | None = None
    size: int | None = None
    on_device: Tensor | None = None

    @classmethod
    def of(cls, sizes: Sequence[int], device: torch.device) -> Groups:
        """Groups whose sizes the host knows."""
        return cls(sum(sizes), len(sizes), device, sizes)

    @classmethod
    def even(cls, count: int, size: int, device: torch.device) -> Groups:
        """Groups of `size` rows each."""
        return cls(count * size, count, device, [size] * count, size)

    @classmethod
    def on(cls, counts: Tensor, rows: int) -> Groups:
        """Groups of `counts` [E] rows, for which the host does not wait; the last one takes what is left."""
        ends = counts.cumsum(0, dtype=torch.int32)
        ends[-1:].fill_(rows)
        return cls(rows, len(counts), counts.device, on_device=ends)

    @cached_property
    def ends(self) -> Tensor:
        """The row behind the last one of each group, int32 [E] on the device; copied there once."""
        if self.on_device is not None:
            return self.on_device
        if self.size is not None:
            return torch.arange(1, self.count + 1, dtype=torch.int32, device=self.device) * self.size
        assert self.sizes is not None, "the sizes are on the host or on the device"
        return sent_to(self.device, torch.tensor(list(accumulate(self.sizes)), dtype=torch.int32))

    @cached_property
    def numbers(self) -> Tensor:
        """The group of each row, int64 [R] on the device."""
        return torch.searchsorted(self.ends, torch.arange(self.rows, device=self.device), right=True)

    def read(self) -> list[int]:
        """The sizes, for which the host waits if the device alone knows them."""
        return (
            list(self.sizes)
            if self.sizes is not None
            else self.ends.diff(prepend=self.ends.new_zeros(1)).tolist()
        )


@dataclass(frozen=True)
class GroupedFacts(CallFacts):
    """The facts that decide which implementation runs.

    Attributes:
        aligned: whether the rows of all operands are whole multiples of 16 bytes.
        even: whether all groups have as many rows by design.
    """

    aligned: bool
    even: bool


def grouped_linear_reference(x: Tensor, weight: Tensor, groups: Groups) -> Tensor:
    """Row r of group e is x[r] weight[e].T, [R, n]."""
    y, sizes = x.new_empty(x.shape[0], weight.shape[1]), groups.read()
    for rows, out, matrix in zip(x.split(sizes), y.split(sizes), weight, strict=True):
        torch.mm(rows, matrix.t(), out=out)
    return y


def grouped_outer_reference(grad: Tensor, x: Tensor, groups: Groups) -> Tensor:
    """Matrix e is grad_e.T x_e over the rows of group e, [E, n, K]; zeros for an empty group."""
    outer, sizes = x.new_empty(groups.count, grad.shape[1], x.shape[1]), groups.read()
    for left, right, out in zip(grad.split(sizes), x.split(sizes), outer, strict=True):
        torch.mm(left.t(), right, out=out)
    return outer


def _facts(x: Tensor, widths: Iterable[int], groups: Groups) -> GroupedFacts:
    aligned = _aligned(x.dtype, widths)
    return GroupedFacts.of(x, aligned=aligned, even=groups.size is not None)


def _aligned(dtype: torch.dtype, widths: Iterable[int]) -> bool:
    return all(width * dtype.itemsize % _ALIGNED == 0 for width in widths)


def _stacked(rows: Tensor, groups: Groups) -> Tensor:
    """[R, n] as [E, R / E, n], for even groups."""
    return rows.view(groups.count, -1 if groups.count else 0, rows.shape[-1])


def _batched(x: Tensor, weight: Tensor, groups: Groups) -> Tensor:
    return torch.bmm(_stacked(x, groups), weight.transpose(1, 2)).flatten(0, 1)


def _batched_outer(grad: Tensor, x: Tensor, groups: Groups) -> Tensor:
    return torch.bmm(_stacked(grad, groups).transpose(1, 2), _stacked(x, groups))


def _grouped_mm(x: Tensor, weight: Tensor, groups: Groups) -> Tensor:
    return F.grouped_mm(x, weight.transpose(1, 2), offs=groups.ends)


def _grouped_mm_outer(grad: Tensor, x: Tensor, groups: Groups) -> Tensor:
    return F.grouped_mm(grad.t(), x, offs=groups.ends)


def _has_grouped_kernel() -> bool:
    """Whether torch has one kernel for all groups on this device; elsewhere its loop reads the sizes."""
    if not hasattr(F, "grouped_mm") or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability()[0] in (9, 10)


def _cases() -> Iterator[
    tuple[Callable[[torch.device], Groups], str, int, int, tuple[int, int], dict[str, bool]]
]:
    """Groups of uneven sizes, empty ones first, last and among others, one group of all rows, and even ones.

    Yields:
        Makes the groups on a device; a label; the numbers of rows and of groups; n and K; the call's facts.
    """
    many: list[tuple[tuple[int, ...], bool]] = [((2,) * 4, True), ((0, 0), True), ((33,) * 2, True)]
    many += [
        (sizes, False)
        for sizes in ((3, 1, 4), (0, 5, 0, 0, 2, 0), (7,), (0,), (0, 0, 0), (1,) * 9, (129, 0, 3))
    ]
    for sizes, even in many:
        make = partial(Groups.even, len(sizes), sizes[0]) if even else partial(Groups.of, sizes)
        for n, k in ((8, 16), (5, 3), (1, 1), (67, 40)):
            # Rows of an odd number of elements are whole multiples of 16 bytes in no dtype.
            own = {"aligned": n % 8 == 0 and k % 8 == 0, "even": even}
            yield make, f"{sizes}{' even' * even} {n=} {k=}", sum(sizes), len(sizes), (n, k), own


def _linear_examples() -> Iterator[Example]:
    for make, label, rows, count, (n, k), own in _cases():
        shapes = ((rows, k), (count, n, k))
        plain = lambda f, x, w, make=make: f(x, w, make(x.device))  # noqa: E731
        turned = lambda f, x, w, make=make: f(x, w.mT.contiguous().mT, make(x.device))  # noqa: E731
        for call, kind in ((plain, ""), (turned, " transposed")):
            yield Example(label + kind, shapes, call, own=own)


def _outer_examples() -> Iterator[Example]:
    for make, label, rows, _, (n, k), own in _cases():
        call = lambda f, grad, x, make=make: f(grad, x, make(x.device))  # noqa: E731
        yield Example(label, ((rows, n), (rows, k)), call, own=own)


# On CPU, torch's own products of groups are loops too; other dtypes on CUDA take its slow path.
_ON_CUDA = where(CUDA, frozenset({torch.bfloat16}), _has_grouped_kernel, aligned=True)
_EVEN = where(CUDA, even=True)
_CALLS = kinds_of_calls(GroupedFacts, aligned=(False, True), even=(False, True))
GROUPED_LINEAR: Operator[Callable[[Tensor, Tensor, Groups], Tensor]] = Operator(
    "grouped_linear",
    (
        Implementation("batched", _batched, _EVEN),
        Implementation("torch", _grouped_mm, _ON_CUDA),
        Implementation("reference", grouped_linear_reference),
    ),
    _CALLS,
    _linear_examples,
    differentiable=False,
)
GROUPED_OUTER: Operator[Callable[[Tensor, Tensor, Groups], Tensor]] = Operator(
    "grouped_outer",
    (
        Implementation("batched", _batched_outer, _EVEN),
        Implementation("torch", _grouped_mm_outer, _ON_CUDA),
        Implementation("reference", grouped_outer_reference),
    ),
    _CALLS,
    _outer_examples,
    differentiable=False,
)


def reads_sizes(device: torch.device, dtype: torch.dtype, widths: Iterable[int]) -> bool:
    """Whether products of uneven groups of rows of these widths need the sizes on the host."""
    facts = GroupedFacts(device.type, dtype, _aligned(dtype, widths), False)
    return GROUPED_LINEAR.choose(facts).fn is grouped_linear_reference


def grouped_linear(x: Tensor, weight: Tensor, groups: Groups) -> Tensor:
    """Multiply groups of the rows of x [R, K] by weight [E, n, K]: [R, n]. It has no backward."""
    facts = _facts(x, (x.shape[-1], weight.shape[-1], weight.shape[-2]), groups)
    return GROUPED_LINEAR.choose(facts).fn(x, weight, groups)


def grouped_outer(grad: Tensor, x: Tensor, groups: Groups) -> Tensor:
    """The gradient of `grouped_linear`'s weight, [E, n, K], from grad [R, n] and x [R, K]."""
    return GROUPED_OUTER.choose(_facts(x, (grad.shape[-1], x.shape[-1]), groups)).fn(grad, x, groups)


def add_by_group(y: Tensor, bias: Tensor, groups: Groups) -> None:
    """Add row e of bias [E, n] to the rows of group e of y [R, n], in place, in a launch or two on a GPU."""
    if groups.sizes is not None and not y.is_cuda:  # there a launch costs nothing, and a gather reads more
        for rows, vector in zip(y.split(list(groups.sizes)), bias, strict=True):
            rows.add_(vector)
    elif groups.size is not None:
        _stacked(y, groups).add_(bias.unsqueeze(1))
    else:
        y.add_(bias.index_select(0, groups.numbers))


def sums_by_group(grad: Tensor, groups: Groups) -> Tensor:
    """The gradient of `add_by_group`'s bias: the sums of the rows of each group, [E, n]."""
    if groups.sizes is not None and not grad.is_cuda:
        return torch.stack([rows.sum(0) for rows in grad.split(list(groups.sizes))])
    if groups.size is not None:
        return _stacked(grad, groups).sum(1)
    # Products with ones, summed in fp32 and in one order, which atomic additions are not.
    return grouped_outer(grad, grad.new_ones(len(grad), _ALIGNED // grad.element_size()), groups)[..., 0]
