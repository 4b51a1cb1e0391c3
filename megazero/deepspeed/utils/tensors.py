"""DeepSpeed's `runtime.utils`: seeds, memory reports, tensors on devices, norms, and `PartitionedTensor`."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from math import inf, isfinite, prod
from pathlib import Path
from typing import Any, TypeVar

import numpy
import torch
from torch import Tensor

from megazero.deepspeed.accelerator.choose import get_accelerator
from megazero.deepspeed.accelerator.cpu import Accelerator
from megazero.deepspeed.comm.collectives import all_gather_into_tensor, all_reduce
from megazero.deepspeed.comm.mpu import Mpu
from megazero.deepspeed.comm.world import AnyGroup, ReduceOp, get_rank, get_world_size
from megazero.deepspeed.reports.logging import print_dist
from megazero.deepspeed.utils.split import partition_uniform
from megazero.errors import ConfigError
from megazero.mpu.torch_group import joined_world

_GIB = 2**30


def set_random_seed(seed: int) -> None:
    """Seed the generators of Python, numpy and torch."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed % 2**63)


def see_memory_usage(message: str, force: bool = False) -> None:
    """With `force`, print the memory in use on rank 0, and reset the peaks."""
    if not force:
        return
    gc.collect()
    device, host = get_accelerator(), Accelerator()
    if (joined_world() or (0, 1))[0] == 0:
        total, free = host.total_memory(), host.available_memory()
        print(
            f"{message}\n"
            f"MA {device.memory_allocated() / _GIB:.2f} GB | "
            f"Max_MA {device.max_memory_allocated() / _GIB:.2f} GB | "
            f"CA {device.memory_reserved() / _GIB:.2f} GB | "
            f"Max_CA {device.max_memory_reserved() / _GIB:.2f} GB\n"
            f"CPU Virtual Memory: used = {(total - free) / _GIB:.2f} GB, "
            f"percent = {100 * (total - free) / total:.1f}%",
            flush=True,
        )
    device.reset_peak_memory_stats()


def memory_status(msg: str, print_rank: int = -1, reset_max: bool = False) -> None:
    """Print the device's memory in use, on rank `print_rank` or, for -1, on all ranks."""
    device = get_accelerator()
    device.synchronize()
    if reset_max:
        device.reset_peak_memory_stats()
    print_dist(
        f"{msg} device={device.current_device_name()} current alloc={device.memory_allocated() / _GIB:.4f}GB "
        f"(max={device.max_memory_allocated() / _GIB:.4f}GB)",
        [print_rank],
    )


def empty_cache() -> None:
    """Release cached memory of the device, and reset the peak."""
    get_accelerator().empty_cache()
    get_accelerator().reset_peak_memory_stats()


def move_to_device(
    item: Any, device: torch.device | str, criterion_func: Callable[[object], bool] | None = None
) -> Any:
    """Move tensors in nested lists, tuples and dictionaries to a device.

    Args:
        item: a tensor or a collection.
        device: the device.
        criterion_func: chooses the tensors to move, in place; by default all are moved, as copies.
    """
    if criterion_func is not None and criterion_func(item):
        item.data = item.to(device).data
        return item
    moved = _mapped(item, lambda part: move_to_device(part, device, criterion_func))
    if moved is not item or criterion_func is not None or not hasattr(item, "to"):
        return moved
    return item.to(device)


def copy_to_device(item: Any, device: torch.device | str, criterion_func: Callable[[object], bool]) -> Any:
    """Copy the tensors that `criterion_func` chooses to a device; returns the same nesting."""
    if criterion_func(item):
        return item.to(device)
    return _mapped(item, lambda part: copy_to_device(part, device, criterion_func))


def _mapped(item: object, change: Callable[[object], object]) -> object:
    """Apply a function to the items of a collection; other values are returned unchanged."""
    if isinstance(item, dict):
        return {key: change(value) for key, value in item.items()}
    if isinstance(item, (list, tuple)):
        return type(item)(change(part) for part in item) if type(item) is list else tuple(map(change, item))
    return item


T = TypeVar("T")


def get_only_unique_item(items: Iterable[T]) -> T:
    """The value that all items are equal to.

    Raises:
        ConfigError: items differ, or there are none.
    """
    values = set(items)
    if len(values) != 1:
        raise ConfigError(f"`items` must be all the same, but are {sorted(map(str, values))}; check them")
    return values.pop()


def ensure_directory_exists(filename: str) -> None:
    """Make the folder that a file is in."""
    Path(filename).parent.mkdir(parents=True, exist_ok=True)


def call_to_str(base: str, *args: object, **kwargs: object) -> str:
    """The text of a call, such as ``base(1, key=2)``."""
    return f"{base}({', '.join([*map(repr, args), *(f'{k}={v!r}' for k, v in kwargs.items())])})"


def is_model_parallel_parameter(p: Tensor) -> bool:
    """Whether a parameter is marked as a tensor-parallel slice."""
    return bool(getattr(p, "model_parallel", False) or getattr(p, "tensor_model_parallel", False))


def is_invalid_grad_norm(norm: float | Tensor) -> bool:
    """Whether a norm is negative or not finite."""
    value = float(norm)
    return not isfinite(value) or value < 0


def has_inf_or_nan(x: Tensor) -> Tensor:
    """Whether a tensor has an inf or NaN, as a bool tensor on its device."""
    values = x._values() if x.is_sparse else x
    return ~torch.isfinite(values).all()


def get_global_norm(norm_list: Iterable[float | Tensor]) -> float:
    """The 2-norm of a whole from the norms of its parts; inf if one is negative or not finite."""
    norms = [float(norm) for norm in norm_list]
    return inf if any(map(is_invalid_grad_norm, norms)) else sum(norm**2 for norm in norms) ** 0.5


def get_grad_norm(
    parameters: Iterable[Tensor] | Tensor, norm_type: float = 2, mpu: Mpu | None = None
) -> float:
    """The norm of all gradients, over the model-parallel ranks of `mpu`."""
    params, grads = _with_gradients(parameters)
    return float(_norm(params, grads, norm_type, mpu))


def get_weight_norm(
    parameters: Iterable[Tensor] | Tensor, norm_type: float = 2, mpu: Mpu | None = None
) -> float:
    """The norm of all parameters, over the model-parallel ranks of `mpu`."""
    params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    return float(_norm(params, [p.detach() for p in params], norm_type, mpu))


def get_global_norm_of_tensors(
    input_tensors: Sequence[Tensor],
    norm_type: float = 2,
    mpu: Mpu | None = None,
    moe_ep_group: AnyGroup = None,
) -> Tensor:
    """The norm of all tensors, over the model-parallel ranks of `mpu` and over `moe_ep_group`."""
    norm_type = float(norm_type)
    total = _norm(input_tensors, [tensor.detach() for tensor in input_tensors], norm_type, None)
    groups: list[AnyGroup] = [moe_ep_group] if moe_ep_group is not None else []
    groups += [mpu.get_model_parallel_group()] if mpu is not None else []
    for group in groups:
        total = _combine(total, norm_type, group)
    return total


def clip_grad_norm_(
    parameters: Iterable[Tensor] | Tensor,
    max_norm: float,
    norm_type: float = 2,
    mpu: Mpu | None = None,
) -> Tensor:
    """Scale gradients in place so that their norm is at most `max_norm`; returns the norm before.

    With `mpu`, the norm is that of the whole model: slices count on each model-parallel rank, and other
    parameters on the first one alone.
    """
    params, grads = _with_gradients(parameters)
    total = _norm(params, grads, norm_type, mpu)
    scale = (float(max_norm) / (total + 1e-6)).clamp(max=1.0)
    for grad in grads:
        grad.mul_(scale.to(grad))
    return total


def clip_tensors_by_global_norm(
    input_tensors: Sequence[Tensor],
    max_norm: float = 1.0,
    global_norm: float | Tensor | None = None,
    mpu: Mpu | None = None,
    eps: float = 1e-6,
) -> float:
    """Scale tensors in place so that their norm is at most `max_norm`; returns the norm before."""
    norm = get_global_norm_of_tensors(input_tensors, mpu=mpu) if global_norm is None else global_norm
    excess = float(norm) / max_norm
    if excess > 1:
        for tensor in input_tensors:
            tensor.detach().mul_(1.0 / (excess + eps / max_norm))
    return float(norm)


def _with_gradients(parameters: Iterable[Tensor] | Tensor) -> tuple[list[Tensor], list[Tensor]]:
    source = [parameters] if isinstance(parameters, Tensor) else parameters
    params = [param for param in source if param.grad is not None]
    return params, [param.grad for param in params if param.grad is not None]


def _norm(params: Sequence[Tensor], values: Sequence[Tensor], norm_type: float, mpu: Mpu | None) -> Tensor:
    """The norm of the values of parameters; with `mpu`, over its ranks: see `clip_grad_norm_`."""
    norm_type, first = float(norm_type), mpu is None or mpu.get_model_parallel_rank() == 0
    pairs = zip(params, values, strict=True)
    counted = [value for param, value in pairs if first or is_model_parallel_parameter(param)]
    device = values[0].device if values else get_accelerator().current_device_name()
    norms = [torch.linalg.vector_norm(v, norm_type, dtype=torch.float32).to(device) for v in counted]
    stacked = torch.stack(norms) if norms else torch.zeros(1, device=device)
    total = torch.linalg.vector_norm(stacked, norm_type)
    return total if mpu is None else _combine(total, norm_type, mpu.get_model_parallel_group())


def _combine(norm: Tensor, norm_type: float, group: AnyGroup) -> Tensor:
    """Combine the norms of all ranks of a group."""
    if norm_type == inf:
        all_reduce(norm, ReduceOp.MAX, group)
        return norm
    power = norm**norm_type
    all_reduce(power, ReduceOp.SUM, group)
    return power ** (1.0 / norm_type)


def prefix_sum_inc(weights: Sequence[int]) -> list[int]:
    """The running sums of weights."""
    return list(accumulate(weights))


class PartitionedTensor:
    """A tensor of which each rank of a group keeps a slice; the first ranks' slices may be larger by one.

    Args:
        tensor: the whole tensor, on every rank of the group.
        group: the ranks.
        partition_meta: has no effect; see `from_meta`.
    """

    def __init__(self, tensor: Tensor, group: AnyGroup, partition_meta: Tensor | None = None):
        self.group = group
        self.num_parts, self.rank = get_world_size(group), get_rank(group)
        self.orig_size, self.orig_device = list(tensor.size()), tensor.device
        self.partition = partition_uniform(tensor.numel(), self.num_parts)
        start, end = self.partition[self.rank : self.rank + 2]
        self.local_data = tensor.detach().reshape(-1)[start:end].clone()

    @classmethod
    def from_meta(
        cls, meta: Tensor, local_part: Tensor, group: AnyGroup, device: torch.device | str | None = None
    ) -> PartitionedTensor:
        """Build the tensor from the results of `to_meta` and `data` on the rank that has sent them.

        Raises:
            ConfigError: the sender's rank or group size differs from this one's.
        """
        dims, *rest = meta.tolist()
        size, (parts, rank, *bounds) = rest[:dims], rest[dims:]
        made = cls(torch.empty(0, device=local_part.device), group)
        if (made.num_parts, made.rank) != (parts, rank):
            raise ConfigError(
                f"`group` must place this rank at {rank} of {parts}, as `meta` says, but it is at "
                f"{made.rank} of {made.num_parts}; pass the group of the same ranks"
            )
        made.orig_size, made.partition, made.local_data = size, bounds, local_part.detach()
        made.orig_device = local_part.device if device is None else torch.device(device)
        return made

    def full(self, device: torch.device | str | None = None) -> Tensor:
        """The whole tensor; all ranks of the group call this."""
        device = self.orig_device if device is None else device
        largest = self.partition[1]
        own = self.local_data.new_zeros(largest)
        own[: self.local_data.numel()] = self.local_data
        slices = own.new_empty(largest * self.num_parts)
        all_gather_into_tensor(slices, own, self.group)
        sizes = (end - start for start, end in zip(self.partition, self.partition[1:], strict=False))
        rows = zip(slices.view(-1, largest), sizes, strict=True)
        whole = torch.cat([row[:size] for row, size in rows]).view(self.orig_size)
        return whole.to(device) if prod(self.orig_size) else whole

    def to_meta(self) -> Tensor:
        """Encode the shape, this rank and the slices' bounds as a tensor of integers."""
        numbers = [len(self.orig_size), *self.orig_size, self.num_parts, self.rank, *self.partition]
        return torch.tensor(numbers, dtype=torch.long, device=self.orig_device)

    def data(self) -> Tensor:
        """This rank's slice."""
        return self.local_data

    def local_size(self) -> torch.Size:
        """The shape of this rank's slice."""
        return self.local_data.size()

    def full_size(self) -> list[int]:
        """The shape of the whole tensor."""
        return self.orig_size
