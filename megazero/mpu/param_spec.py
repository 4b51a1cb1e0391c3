"""`ParamSpec`: every parameter says where it lives, so that no code has to guess from names or shapes.

Gradient reduction, the gradient norm, sharding, checkpoints and conversion all read it. A spec says which
dims are cut over which axes of the mesh. The slices and their offsets, the replicas, and the ranks on which
the parameter counts in sums all follow from that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from megazero.mpu.grid import SLICE_AXES, Place, numbering, slice_axes
from megazero.mpu.group import Group
from megazero.mpu.matrices import Matrices

SHARERS = ("tied", "pp")
"""The communicators over pipeline stages that hold copies of one parameter: the two ends, and all stages."""


@dataclass(frozen=True)
class InitialValues:
    """Initial values of the given `kind`.

    Attributes:
        kind: how they are drawn.
        std: the standard deviation if they are normal.
        made: computes the values from drawn float32 numbers; None keeps the numbers as drawn.
        value: the value of all elements of the kind ``constant``.
    """

    kind: Literal["normal", "zeros", "ones", "constant"]
    std: float = 0.0
    made: Callable[[Tensor], Tensor] | None = None
    value: float = 0.0


@dataclass(frozen=True)
class Cut:
    """One dim of a parameter, sliced evenly over one axis of the mesh.

    Attributes:
        dim: index of the dim.
        axis: ``tp``; for experts, ``ep`` for the dim that counts them, or ``etp``.
        padded_size: allocated size of the dim if it exceeds the logical one (a padded vocabulary).
    """

    dim: int
    axis: str
    padded_size: int | None = None


@dataclass(frozen=True)
class ParamSpec:
    """The place of one parameter.

    Attributes:
        name: global name, the same on every layout, such as ``layers.3.mlp.up.weight``.
        shape: logical shape of the whole parameter, without padding.
        init: initial values, a function of (seed, name) alone.
        cuts: the dims that are sliced, each over an axis of its own; expert weights [E, f, h] may have E
            sliced over ``ep`` and f over ``etp``. A parameter that is cut over ``ep`` belongs to experts.
        weight_decay: whether the optimizer decays it.
        tied_with: global name of the parameter that this is a copy of on another pipeline stage.
        shared: whether another pipeline stage holds a copy (both are marked); their gradients are summed.
        sharers: the communicator over the stages that hold one, of `SHARERS`.
        partial_grad: each tensor-parallel rank's gradient covers its part of the sequence only (sequence
            parallelism), so the gradients must be summed over them.
        expert: it belongs, whole, to one expert of its own name: ranks with another index along ``ep`` hold
            other experts' parameters, and no part of it.
        matrices: the matrices between hidden vectors that it is made of; None for vectors, tables and heads.
    """

    name: str
    shape: tuple[int, ...]
    init: InitialValues
    cuts: tuple[Cut, ...] = ()
    weight_decay: bool = True
    tied_with: str | None = None
    shared: bool = False
    sharers: str = "tied"
    partial_grad: bool = False
    expert: bool = False
    matrices: Matrices | None = None

    def __post_init__(self) -> None:
        dims, described = [cut.dim for cut in self.cuts], f"{self.name} {self.shape} has {self.cuts}"
        assert all(0 <= dim < len(self.shape) for dim in dims), f"{described}, but not those dims"
        assert len(set(dims)) == len(dims), f"{described}, but a dim is cut over one axis"
        assert len(set(self.axes)) == len(self.axes), f"{described}, but an axis cuts one dim"
        assert set(self.axes) <= set(SLICE_AXES), f"{described}, but the axes that cut are {SLICE_AXES}"
        numbering((*self.axes, *(("ep",) if self.expert else ())))
        assert not (self.expert and "ep" in self.axes), f"{described}, but is of one expert"
        allocated = zip(self.padded_shape, self.shape, strict=True)
        assert all(padded >= size for padded, size in allocated), f"{described}, but holds more than that"

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that the parameter is cut over."""
        return tuple(cut.axis for cut in self.cuts)

    @property
    def replicas(self) -> str:
        """Name of the communicator over the ranks that hold the same slice for other parts of the batch."""
        return "expert_replica" if self.expert or "ep" in self.axes else "replica"

    @property
    def traits(self) -> tuple[object, ...]:
        """The traits by which the gradient norm and the update divide a bucket; the same on every rank."""
        return (not self.weight_decay, copy_axes(self), self.tied_with is not None, self.partial_grad)

    @property
    def padded_shape(self) -> tuple[int, ...]:
        """Shape of the whole parameter as allocated."""
        shape = list(self.shape)
        for cut in self.cuts:
            shape[cut.dim] = cut.padded_size or shape[cut.dim]
        return tuple(shape)

    def local_shape(self, place: Place) -> tuple[int, ...]:
        """Shape of the slice at `place`."""
        shape = list(self.padded_shape)
        for cut in self.cuts:
            size = place.size(cut.axis)
            assert shape[cut.dim] % size == 0, f"{self.name} {shape} does not divide by {size}: {cut}"
            shape[cut.dim] //= size
        return tuple(shape)

    def offset(self, place: Place) -> tuple[int, ...]:
        """The offset of the slice at `place` in the whole parameter."""
        start, local = [0] * len(self.shape), self.local_shape(place)
        for cut in self.cuts:
            start[cut.dim] = place.index(cut.axis) * local[cut.dim]
        return tuple(start)

    def present(self, place: Place) -> tuple[int, ...]:
        """The size of each dim of the slice at `place` without padding, which is at its end."""
        bounds = zip(self.local_shape(place), self.shape, self.offset(place), strict=True)
        return tuple(max(0, min(size, whole - start)) for size, whole, start in bounds)

    def present_elements(self, place: Place) -> list[range]:
        """The elements of the flattened slice at `place` that are not padding, as runs of neighbours."""
        local, present = self.local_shape(place), self.present(place)
        runs, inner = [range(1)], 1
        for size, kept in zip(reversed(local), reversed(present), strict=True):
            if runs == [range(inner)]:
                runs = [range(inner * kept)]
            else:
                runs = [range(i * inner + r.start, i * inner + r.stop) for i in range(kept) for r in runs]
            inner *= size
        return [run for run in runs if run]

    def copy(self, place: Place) -> tuple[int, int]:
        """The index, from 0, of the copy at `place` among one model's equal copies, and their number."""
        number, count = 0, 1
        for axis in copy_axes(self):
            number, count = number * place.size(axis) + place.index(axis), count * place.size(axis)
        return number, count

    def counts_on(self, place: Place) -> bool:
        """Whether the slice at `place` counts in sums over the model (norms); if so, its replicas do too."""
        return self.copy(place)[0] == 0 and self.tied_with is None

    def unshard(self, local: Tensor, groups: Mapping[str, Group]) -> Tensor:
        """Gather the whole logical tensor, without padding. All ranks along the cut axes must call this.

        Args:
            local: this rank's slice.
            groups: the groups of `ParallelContext`, by axis.
        """
        for cut in self.cuts:
            group = groups[cut.axis]
            slices = local.new_empty(group.size * local.numel())
            group.all_gather(slices, local.contiguous().view(-1)).wait()
            whole = torch.cat(list(slices.view(group.size, *local.shape)), cut.dim)
            local = whole.narrow(cut.dim, 0, self.shape[cut.dim])
        return local

    def shard(self, whole: Tensor, place: Place) -> Tensor:
        """The slice at `place` of a whole logical tensor; padding is zero."""
        if not self.cuts:
            return whole
        start, present = self.offset(place), self.present(place)
        local = whole.new_zeros(self.local_shape(place))
        theirs = tuple(slice(first, first + size) for first, size in zip(start, present, strict=True))
        local[tuple(slice(size) for size in present)] = whole[theirs]
        return local


def matrix_spec(spec: ParamSpec, place: Place) -> ParamSpec:
    """The same parameter without the cuts between its matrices: what ranks gather to have whole matrices."""
    assert spec.matrices is not None, f"{spec.name} has no matrices"
    local, stacked = spec.local_shape(place), spec.matrices.stacked
    cuts = tuple(cut for cut in spec.cuts if cut.dim >= stacked)
    return replace(spec, shape=(*local[:stacked], *spec.shape[stacked:]), cuts=cuts)


def copy_axes(spec: ParamSpec) -> tuple[str, ...]:
    """Axes along which a model holds equal copies of a parameter: it could be cut over them, but is not."""
    different = (*spec.axes, "ep") if spec.expert else spec.axes
    return tuple(axis for axis in slice_axes(spec.replicas) if axis not in different)


def spec_of(parameter: nn.Parameter) -> ParamSpec:
    """The spec that a parameter carries as its attribute `spec`."""
    spec = getattr(parameter, "spec", None)
    assert isinstance(spec, ParamSpec), f"a parameter of shape {tuple(parameter.shape)} has no ParamSpec"
    return spec
