"""`Partition`: this rank's slice of a parameter, from when it is built until an engine takes it over."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from megazero.deepspeed.zero.parameter import Home, ZeroParameter, ZeroParamStatus, become, mark
from megazero.errors import MegazeroError
from megazero.mpu.group import Group
from megazero.mpu.host import on_device

# Of these, `ShardedParameter` tells its facts without its values.
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
    """A parameter before an engine takes it over, while its values are on no rank whole.

    While the model is being built, a function of torch that touches it makes it whole for a while: all ranks
    run the same constructor. Later it reads as NaN; `torch.equal` compares the slices of all ranks.
    """

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        mine = {id(arg): arg for arg in _flat((*args, *kwargs.values())) if type(arg) is ShardedParameter}
        homes = [(param, home) for param in mine.values() if (home := partition_of(param)) is not None]
        if _touches(func):
            opened = [(param, home) for param, home in homes if home.building]
            for builder in {id(home.builder): home.builder for _, home in opened}.values():
                assert builder is not None, "only those of builders are opened"
                builder.open([param for param, home in opened if home.builder is builder])
            if func in (torch.equal, Tensor.equal) and len(homes) == 2 and not opened:
                return homes[0][1].equals(homes[1][1])
        try:
            plain: Callable[..., Any] = nn.Parameter.__torch_function__
            return plain(func, types, args, kwargs)
        except RuntimeError as error:
            if "single memory location" not in str(error) or not homes:
                raise
            shape = list(homes[0][0].shape)
            raise MegazeroError(
                f"a parameter of shape {shape} must be whole while it is written, but is sharded; write "
                "within `zero.GatheredParameters(parameter, modifier_rank=0)`"
            ) from error


class Builder(Protocol):
    """A `zero.Init`."""

    @property
    def active(self) -> bool:
        """Whether the context has begun and not ended."""

    def open(self, params: Sequence[nn.Parameter]) -> None:
        """Make these parameters whole, until others are needed or the context ends; every rank calls this."""

    def close(self, params: Iterable[nn.Parameter]) -> None:
        """Shard those of these parameters that `open` made whole."""


@dataclass(frozen=True)
class Shelf:
    """Where slices are kept, and how.

    Attributes:
        group: the ranks that share a parameter.
        device: where parameters are whole.
        place: where slices are kept.
        pin: whether slices on the host are in locked memory.
    """

    group: Group
    device: torch.device
    place: torch.device
    pin: bool = False

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Room for a slice."""
        return torch.zeros(numel, dtype=dtype, device=self.place, pin_memory=self.pin)


class Partition(Home):
    """This rank's slice of one parameter.

    Args:
        param: a whole parameter; from now on it reads as NaN and takes no memory. All ranks take the values
            of the group's first rank.
        shelf: where the slice is kept.
        dtype: the dtype of the slice; None keeps the parameter's.
        builder: the context that the parameter is built in.
    """

    def __init__(
        self,
        param: nn.Parameter,
        shelf: Shelf,
        dtype: torch.dtype | None = None,
        builder: Builder | None = None,
    ):
        self.shelf, self.group = shelf, shelf.group
        self.builder = builder
        self.opened = False
        self.take(param.data.to(shelf.device, dtype or param.dtype))
        self._attach(param)

    @property
    def building(self) -> bool:
        """Whether the context that the parameter is built in has not ended."""
        return self.builder is not None and self.builder.active

    def take(self, value: Tensor) -> None:
        """Keep this rank's slice of the first rank's value, whatever its shape and type."""
        self.shape = value.shape
        self._nothing = torch.full((), float("nan") if value.is_floating_point() else 0, dtype=value.dtype)
        self._nothing = self._nothing.to(self.shelf.device)
        self.shard = self.shelf.zeros(max(1, -(-value.numel() // self.group.size)), value.dtype)
        value = value.contiguous()
        self.group.broadcast(value, 0).wait()
        self.store(value)

    def whole(self) -> Tensor:
        """Assemble the parameter's values from every rank's slice; every rank calls this."""
        mine = on_device(self.shard, self.shelf.device)
        flat = mine.new_empty(mine.numel() * self.group.size)
        self.group.all_gather(flat, mine).wait()
        return flat[: self.shape.numel()].view(self.shape)

    def store(self, value: Tensor) -> None:
        """Keep this rank's slice of a value that is the same on every rank."""
        start = self.group.rank * self.shard.numel()
        mine = value.reshape(-1)[start : start + self.shard.numel()]
        self.shard[: mine.numel()].copy_(mine)

    def move(self, group: Group) -> None:
        """Shard the parameter over `group`, a part of the present group; all ranks of that one call this."""
        value = self.whole()
        self.group = group
        self.shard = self.shelf.zeros(max(1, -(-value.numel() // group.size)), value.dtype)
        self.store(value)

    def equals(self, other: Partition) -> bool:
        """Whether both hold the same values; every rank calls this."""
        if self.shape != other.shape or self.shard.dtype != other.shard.dtype:
            return False
        same = torch.tensor(int(torch.equal(self.shard, other.shard)), device=self.shelf.device)
        self.group.all_reduce(same, "min").wait()
        return bool(same)

    @contextmanager
    def gathered(self, params: Iterable[nn.Parameter], *, write_back: bool) -> Iterator[None]:
        """Context in which the parameter is whole; with `write_back`, changes to it are kept."""
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
        """Make the parameter whole; every rank calls this."""
        become(param, ZeroParameter)
        self.opened = True
        param.data = self.whole()

    def hide(self, param: nn.Parameter) -> None:
        """Let the parameter read as NaN again."""
        param.data = self._nothing.expand(self.shape)
        self.opened = False
        become(param, ShardedParameter)

    def _attach(self, param: nn.Parameter) -> None:
        # Some models copy layers while they are built (torch's TransformerEncoder does); copy the slice too.
        param.__dict__.update(zero_home=self, __deepcopy__=MethodType(_copy, param))
        self.hide(param)
        self.mark(param)

    def mark(self, param: nn.Parameter) -> None:
        """Give the parameter DeepSpeed's attributes."""
        mark(param, self.group, ShardedParameter, slice_size=self.shard.numel())


def _copy(param: nn.Parameter, memo: dict[int, Any]) -> nn.Parameter:
    """A copy of a sharded parameter, sharded in the same way."""
    home = partition_of(param)
    assert home is not None, "only sharded parameters are copied here"
    if home.builder is not None:
        home.builder.close([param])
    twin = nn.Parameter(home._nothing.expand(home.shape), param.requires_grad)
    memo[id(param)] = twin
    other = object.__new__(Partition)
    other.__dict__.update(home.__dict__, shard=home.shard.clone())
    other._attach(twin)
    return twin


def can_be_sharded(param: nn.Parameter) -> bool:
    """Whether the parameter is whole and has values."""
    return "zero_home" not in param.__dict__ and not is_lazy(param) and not param.is_meta


def partition_of(param: nn.Parameter) -> Partition | None:
    """The slice of a parameter that `Init` has sharded, until an engine takes it over; None for others."""
    home = getattr(param, "zero_home", None)
    return home if isinstance(home, Partition) else None


def _touches(func: Callable[..., Any]) -> bool:
    """Whether a function of torch reads or writes values."""
    name: str = getattr(func, "__name__", "")
    if name not in ("__get__", "__set__", "__delete__"):
        return name not in _FACTS
    attribute: Any = getattr(func, "__self__", None)
    return getattr(attribute, "__name__", "") in _VALUES


def _flat(value: Any) -> Iterator[Any]:
    """The items of nested lists and tuples."""
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _flat(item)
    else:
        yield value
