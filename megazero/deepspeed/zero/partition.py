"""`Partition`: this rank's slice of a parameter under `zero.Init`, until an engine takes it over."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from megazero.deepspeed.zero.parameter import ShardHolder, ZeroParameter, ZeroParamStatus, become, mark
from megazero.errors import MegazeroError
from megazero.mpu.group import Group
from megazero.mpu.host import on_device

# Functions of torch that need no values of a parameter.
_FACTS = frozenset(
    {
        *("size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "element_size"),
        *("is_floating_point", "is_complex", "is_contiguous", "is_shared", "get_device", "requires_grad_"),
        *("register_hook", "register_post_accumulate_grad_hook", "__hash__", "__repr__", "__format__"),
        *("__reduce_ex__", "__dir__", "__setstate__", "__len__"),
    }
)
_VALUES = frozenset({"data", "T", "mT", "H", "mH", "real", "imag"})


class ShardedParameter(ZeroParameter):
    """A parameter under `zero.Init`, of which no rank has all values.

    While the model is being built, a function of torch that reads or writes its values gathers it, because
    all ranks run the same constructors. Later its values are NaN; `torch.equal` compares all ranks' slices.
    """

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        sharded = {id(arg): arg for arg in _flat((*args, *kwargs.values())) if type(arg) is ShardedParameter}
        partitions = [(param, own) for param in sharded.values() if (own := partition_of(param)) is not None]
        if _touches(func):
            building = [(param, own) for param, own in partitions if own.building]
            for builder in {id(own.builder): own.builder for _, own in building}.values():
                assert builder is not None, "`building` implies a builder"
                builder.open([param for param, own in building if own.builder is builder])
            if func in (torch.equal, Tensor.equal) and len(partitions) == 2 and not building:
                return partitions[0][1].equals(partitions[1][1])
        try:
            plain: Callable[..., object] = nn.Parameter.__torch_function__
            return plain(func, types, args, kwargs)
        except RuntimeError as error:
            if "single memory location" not in str(error) or not partitions:
                raise
            shape = list(partitions[0][0].shape)
            raise MegazeroError(
                f"a parameter of shape {shape} must be whole while it is written, but is sharded; write "
                "within `zero.GatheredParameters(parameter, modifier_rank=0)`"
            ) from error


class Builder(Protocol):
    """The context that a parameter is built in: `zero.Init`, which imports this module."""

    @property
    def active(self) -> bool:
        """Whether the context is entered."""

    def open(self, params: Sequence[nn.Parameter]) -> None:
        """Gather parameters until others need the memory or the context ends; every rank calls this."""

    def close(self, params: Iterable[nn.Parameter]) -> None:
        """Shard the parameters that `open` has gathered; leave all others alone."""


@dataclass(frozen=True)
class SliceStorage:
    """The ranks that a parameter is sharded over, and the memory of its slices.

    Attributes:
        group: the ranks.
        device: the device of gathered parameters.
        slice_device: the device of slices.
        pin: whether slices on the host are in pinned memory.
    """

    group: Group
    device: torch.device
    slice_device: torch.device
    pin: bool = False

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Memory for a slice."""
        return torch.zeros(numel, dtype=dtype, device=self.slice_device, pin_memory=self.pin)


class Partition(ShardHolder):
    """This rank's slice of one parameter.

    Args:
        param: a whole parameter; from now on its values are NaN and take no memory. All ranks get slices of
            the first rank's values.
        storage: the ranks, and the memory of slices.
        dtype: the dtype of the slice; None keeps the parameter's.
        builder: the context that the parameter is built in; None after it.
    """

    def __init__(
        self,
        param: nn.Parameter,
        storage: SliceStorage,
        dtype: torch.dtype | None = None,
        builder: Builder | None = None,
    ):
        self.storage, self.group = storage, storage.group
        self.builder = builder
        self.opened = False
        self.take(param.data.to(storage.device, dtype or param.dtype))
        self._attach(param)

    @property
    def building(self) -> bool:
        """Whether the context that the parameter is built in has not ended."""
        return self.builder is not None and self.builder.active

    def take(self, value: Tensor) -> None:
        """Keep this rank's slice of the first rank's value, which may have a new shape and type."""
        self.shape = value.shape
        self._nan = torch.full((), float("nan") if value.is_floating_point() else 0, dtype=value.dtype)
        self._nan = self._nan.to(self.storage.device)
        self.shard = self.storage.zeros(max(1, -(-value.numel() // self.group.size)), value.dtype)
        value = value.contiguous()
        self.group.broadcast(value, 0).wait()
        self.store(value)

    def whole(self) -> Tensor:
        """Gather the whole parameter; every rank calls this."""
        own = on_device(self.shard, self.storage.device)
        flat = own.new_empty(own.numel() * self.group.size)
        self.group.all_gather(flat, own).wait()
        return flat[: self.shape.numel()].view(self.shape)

    def store(self, value: Tensor) -> None:
        """Copy this rank's slice of a value that all ranks have."""
        start = self.group.rank * self.shard.numel()
        own = value.reshape(-1)[start : start + self.shard.numel()]
        self.shard[: own.numel()].copy_(own)

    def move(self, group: Group) -> None:
        """Shard the parameter over `group`, a part of the present group, all of whose ranks call this."""
        value = self.whole()
        self.group = group
        self.shard = self.storage.zeros(max(1, -(-value.numel() // group.size)), value.dtype)
        self.store(value)

    def equals(self, other: Partition) -> bool:
        """Whether two parameters have equal values; every rank calls this."""
        if self.shape != other.shape or self.shard.dtype != other.shard.dtype:
            return False
        same = torch.tensor(int(torch.equal(self.shard, other.shard)), device=self.storage.device)
        self.group.all_reduce(same, "min").wait()
        return bool(same)

    @contextmanager
    def gathered(self, params: Iterable[nn.Parameter], *, write_back: bool) -> Iterator[None]:
        """Context in which the parameter is whole; with `write_back`, changes go into the slices."""
        (param,) = params
        if self.builder is not None:
            self.builder.close([param])
        self.show(param)
        try:
            with torch.no_grad():
                yield
                if write_back:
                    self.store(param.data)
        finally:
            self.hide(param)

    def status(self, param: nn.Parameter) -> ZeroParamStatus:
        return ZeroParamStatus.AVAILABLE if self.opened else ZeroParamStatus.NOT_AVAILABLE

    def piece(self, param: nn.Parameter) -> Tensor:
        return self.shard

    def show(self, param: nn.Parameter) -> None:
        """Gather the parameter; every rank calls this."""
        become(param, ZeroParameter)
        self.opened = True
        param.data = self.whole()

    def hide(self, param: nn.Parameter) -> None:
        """Free the gathered parameter; its values are NaN again."""
        param.data = self._nan.expand(self.shape)
        self.opened = False
        become(param, ShardedParameter)

    def _attach(self, param: nn.Parameter) -> None:
        # Some models copy layers while they are built, such as torch's TransformerEncoder.
        param.__dict__.update(shard_holder=self, __deepcopy__=MethodType(_copy, param))
        self.hide(param)
        self.mark(param)

    def mark(self, param: nn.Parameter) -> None:
        """Set DeepSpeed's attributes of the parameter."""
        mark(param, self.group, ShardedParameter, slice_size=self.shard.numel())


def _copy(param: nn.Parameter, memo: dict[int, object]) -> nn.Parameter:
    """Copy a sharded parameter with its slice; the `__deepcopy__` of such a parameter."""
    source = partition_of(param)
    assert source is not None, "only sharded parameters have this `__deepcopy__`"
    if source.builder is not None:
        source.builder.close([param])
    twin = nn.Parameter(source._nan.expand(source.shape), param.requires_grad)
    memo[id(param)] = twin
    other = object.__new__(Partition)
    other.__dict__.update(source.__dict__, shard=source.shard.clone())
    other._attach(twin)
    return twin


def can_be_sharded(param: nn.Parameter) -> bool:
    """Whether the parameter is whole and has values."""
    return "shard_holder" not in param.__dict__ and not is_lazy(param) and not param.is_meta


def partition_of(param: nn.Parameter) -> Partition | None:
    """The partition of a parameter under `zero.Init`; None for any other."""
    holder = getattr(param, "shard_holder", None)
    return holder if isinstance(holder, Partition) else None


def _touches(func: Callable[..., object]) -> bool:
    """Whether a function of torch reads or writes values."""
    name: str = getattr(func, "__name__", "")
    if name not in ("__get__", "__set__", "__delete__"):
        return name not in _FACTS
    return getattr(getattr(func, "__self__", None), "__name__", "") in _VALUES


def _flat(value: object) -> Iterator[object]:
    """The items of nested lists and tuples."""
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _flat(item)
    else:
        yield value
