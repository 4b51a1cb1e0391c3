"""`ZeroParameter`: a parameter of ZeRO stage 3, with DeepSpeed's attributes; and `ShardHolder`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from enum import Enum
from itertools import count
from typing import ClassVar, Protocol

from torch import Tensor, nn

from megazero.mpu.group import Done, Group


class ZeroParamStatus(Enum):
    """Whether a parameter's values are on this rank."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class ZeroParamType(Enum):
    """The types of parameters that DeepSpeed distinguishes; here all are `PARTITIONED`."""

    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3


class ShardHolder(Protocol):
    """The holder of a parameter's slice: a `Partition` until an engine takes it over.

    It is the parameter's attribute `shard_holder`; a parameter without one is whole.
    """

    group: Group

    def gathered(self, params: Iterable[nn.Parameter], *, write_back: bool) -> AbstractContextManager[None]:
        """A context in which `params` are whole; see `DataParallel.gathered`."""

    def status(self, param: nn.Parameter) -> ZeroParamStatus:
        """Whether the parameter's values are on this rank."""

    def piece(self, param: nn.Parameter) -> Tensor:
        """The elements of the parameter that this rank keeps, flat; possibly none."""


class ZeroParameter(nn.Parameter):
    """A parameter of ZeRO stage 3, with the attributes and methods that DeepSpeed's scripts use.

    Attributes:
        ds_id: a unique number in this process.
        ds_shape: the shape of the whole parameter, the same as `shape`.
        ds_numel: its number of elements, the same as `numel()`.
        ds_persist: whether it stays whole because it is small.
        ds_process_group: the group that it is sharded over.
        ds_zero_partition_rank: this rank within the group.
        ds_zero_partition_world_size: the size of the group.
        ds_param_type: `ZeroParamType.PARTITIONED`.
        ds_active_sub_modules: empty; our hooks do not use it.
        ds_secondary_tensor: None; the slices of `zero_hpz_partition_size` are kept elsewhere.
        is_external_param: whether it was registered with `register_external_parameter`.
    """

    numbers: ClassVar[Iterator[int]] = count()

    @property
    def ds_status(self) -> ZeroParamStatus:
        """Whether the values are on this rank."""
        return holder_of(self).status(self)

    @property
    def ds_tensor(self) -> Tensor:
        """The elements that this rank keeps between uses, flat; of an engine's parameter, any number."""
        return holder_of(self).piece(self)

    def all_gather(
        self, param_list: Sequence[nn.Parameter] | None = None, async_op: bool = False, hierarchy: int = 0
    ) -> None:
        """Gather parameters until `partition`; every rank calls this, and it returns when they are whole."""
        for param in [self] if param_list is None else param_list:
            if "zero_open" not in param.__dict__:
                stack = ExitStack()
                stack.enter_context(holder_of(param).gathered([param], write_back=False))
                param.__dict__["zero_open"] = stack

    def all_gather_coalesced(self, params: Iterable[nn.Parameter], **options: object) -> Done:
        """Call `all_gather`; options have no effect, and the returned handle is done."""
        self.all_gather(list(params))
        return Done()

    def partition(
        self,
        param_list: Sequence[nn.Parameter] | None = None,
        hierarchy: int = 0,
        has_been_updated: bool = False,
        free_data: bool = True,
    ) -> None:
        """Shard parameters again after `all_gather`; every rank calls this.

        Args:
            param_list: the parameters; by default this one.
            hierarchy: has no effect.
            has_been_updated: keep changes, which must be the same on every rank.
            free_data: has no effect; the memory is always freed.
        """
        for param in [self] if param_list is None else param_list:
            stack = param.__dict__.pop("zero_open", None)
            if not isinstance(stack, ExitStack):
                continue
            value = param.data.clone() if has_been_updated else None
            stack.close()
            if value is not None:
                with holder_of(param).gathered([param], write_back=True):
                    param.data.copy_(value)

    def partition_numel(self) -> int:
        """The number of elements that this rank keeps between uses."""
        return self.ds_tensor.numel()

    def padding_size(self) -> int:
        """The number of padding elements in the last rank's slice."""
        return max(0, int(self.__dict__["ds_slice"]) * holder_of(self).group.size - self.numel())

    def ds_summary(self) -> dict[str, object]:
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
    """Set DeepSpeed's attributes of a parameter that has a `shard_holder`.

    Args:
        param: the parameter.
        group: the group that it is sharded over.
        kind: its class from now on; parameters of other libraries' classes keep theirs.
        persist: whether it stays whole.
        slice_size: the number of elements of every rank's slice; 0 if ranks have different numbers.
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


def holder_of(param: nn.Parameter) -> ShardHolder:
    """The `shard_holder` of a parameter."""
    holder: ShardHolder = param.__dict__["shard_holder"]
    return holder


def is_zero_param(param: object) -> bool:
    """Whether `param` is a parameter of ZeRO stage 3."""
    return isinstance(param, Tensor) and "ds_id" in param.__dict__


def become(param: nn.Parameter, kind: type[nn.Parameter]) -> None:
    """Change a parameter's class, unless it is another library's."""
    if type(param) is nn.Parameter or isinstance(param, ZeroParameter):
        param.__class__ = kind
