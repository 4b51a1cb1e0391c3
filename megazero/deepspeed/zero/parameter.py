"""A parameter of ZeRO stage 3 as DeepSpeed's scripts see it, and who holds its slices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from enum import Enum
from itertools import count
from typing import Any, ClassVar, Protocol

from torch import Tensor, nn

from megazero.mpu.group import Done, Group


class ZeroParamStatus(Enum):
    """Whether a parameter's values are on this rank."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class ZeroParamType(Enum):
    """The kinds of parameters that DeepSpeed tells apart; here all are `PARTITIONED`."""

    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3


class Home(Protocol):
    """The holder of a parameter's shards: a `Partition` while the model is built, later an engine.

    A parameter's `zero_home` attribute is its home; a parameter without one is whole.
    """

    group: Group

    def gathered(self, params: Iterable[nn.Parameter], *, write_back: bool) -> AbstractContextManager[None]:
        """A context manager within which `params` are whole; see `DataParallel.gathered`."""

    def status(self, param: nn.Parameter) -> ZeroParamStatus:
        """Whether the parameter's values are here."""

    def piece(self, param: nn.Parameter) -> Tensor:
        """The elements of the parameter that this rank keeps, flat; there may be none."""


class ZeroParameter(nn.Parameter):
    """A parameter of ZeRO stage 3, with the attributes and methods that DeepSpeed's scripts use.

    Attributes:
        ds_id: a number of its own in this process.
        ds_shape: the shape of the whole parameter; `shape` is the same.
        ds_numel: the number of its elements; `numel()` is the same.
        ds_persist: whether it stays whole because it is small.
        ds_process_group: the ranks that it is sharded over.
        ds_zero_partition_rank: this rank's number among them.
        ds_zero_partition_world_size: how many they are.
        ds_param_type: `ZeroParamType.PARTITIONED`.
        ds_active_sub_modules: empty; nothing is counted here.
        ds_secondary_tensor: None; `zero_hpz_partition_size` keeps its second slices elsewhere.
        is_external_param: whether `register_external_parameter` named it.
    """

    numbers: ClassVar[Iterator[int]] = count()

    @property
    def ds_status(self) -> ZeroParamStatus:
        """Whether the values are on this rank."""
        return home_of(self).status(self)

    @property
    def ds_tensor(self) -> Tensor:
        """The elements that this rank keeps between uses, flat; an engine's slices may be of any length."""
        return home_of(self).piece(self)

    def all_gather(
        self, param_list: Sequence[nn.Parameter] | None = None, async_op: bool = False, hierarchy: int = 0
    ) -> None:
        """Make the parameters whole until `partition`; every rank calls this, and all wait."""
        for param in [self] if param_list is None else param_list:
            if "zero_open" not in param.__dict__:
                stack = ExitStack()
                stack.enter_context(home_of(param).gathered([param], write_back=False))
                param.__dict__["zero_open"] = stack

    def all_gather_coalesced(self, params: Iterable[nn.Parameter], **options: Any) -> Done:
        """See `all_gather`; options have no effect, and there is nothing left to wait for."""
        self.all_gather(list(params))
        return Done()

    def partition(
        self,
        param_list: Sequence[nn.Parameter] | None = None,
        hierarchy: int = 0,
        has_been_updated: bool = False,
        free_data: bool = True,
    ) -> None:
        """Leave each rank its slice again; every rank calls this after `all_gather`.

        Args:
            param_list: the parameters; default: this one.
            hierarchy: no effect.
            has_been_updated: keep changes, which must be the same on every rank.
            free_data: no effect; the memory is freed.
        """
        for param in [self] if param_list is None else param_list:
            stack = param.__dict__.pop("zero_open", None)
            if not isinstance(stack, ExitStack):
                continue
            value = param.data.clone() if has_been_updated else None
            stack.close()
            if value is not None:
                with home_of(param).gathered([param], write_back=True):
                    param.data.copy_(value)

    def partition_numel(self) -> int:
        """The number of elements that this rank keeps between uses."""
        return self.ds_tensor.numel()

    def padding_size(self) -> int:
        """The number of elements by which the last rank's slice exceeds what is left for it."""
        return max(0, int(self.__dict__["ds_slice"]) * home_of(self).group.size - self.numel())

    def ds_summary(self) -> dict[str, Any]:
        """The attributes as plain values, for messages."""
        facts = self.__dict__
        return {
            "id": facts["ds_id"],
            "status": self.ds_status.name,
            "numel": self.numel(),
            "ds_numel": facts["ds_numel"],
            "shape": tuple(self.shape),
            "ds_shape": tuple(facts["ds_shape"]),
            "requires_grad": self.requires_grad,
            "grad_shape": None if self.grad is None else tuple(self.grad.shape),
            "persist": facts["ds_persist"],
            "active_sub_modules": set(),
            "ds_tensor.shape": tuple(self.ds_tensor.shape),
        }


def mark(
    param: nn.Parameter,
    group: Group,
    kind: type[ZeroParameter] = ZeroParameter,
    *,
    persist: bool = False,
    slice_size: int = 0,
) -> None:
    """Give a parameter, which has a home, DeepSpeed's attributes.

    Args:
        param: the parameter.
        group: the ranks that it is sharded over.
        kind: its class from now on; parameters of other libraries' classes keep theirs.
        persist: whether it stays whole.
        slice_size: the number of elements of a slice, if all ranks have as many.
    """
    become(param, kind)
    facts = param.__dict__
    facts.setdefault("ds_id", next(ZeroParameter.numbers))
    facts.setdefault("is_external_param", False)
    facts.update(
        ds_shape=param.shape,
        ds_numel=param.numel(),
        ds_persist=persist,
        ds_process_group=group,
        ds_zero_partition_rank=group.rank,
        ds_zero_partition_world_size=group.size,
        ds_param_type=ZeroParamType.PARTITIONED,
        ds_active_sub_modules=set(),
        ds_secondary_tensor=None,
        ds_slice=slice_size,
    )


def home_of(param: nn.Parameter) -> Home:
    """The holder of a parameter's shards."""
    home: Home = param.__dict__["zero_home"]
    return home


def is_zero_param(param: Any) -> bool:
    """Whether the parameter is one of ZeRO stage 3."""
    return isinstance(param, Tensor) and "ds_id" in param.__dict__


def become(param: nn.Parameter, kind: type[nn.Parameter]) -> None:
    """Change a parameter's class; those of other libraries keep theirs."""
    if type(param) is nn.Parameter or isinstance(param, ZeroParameter):
        param.__class__ = kind
