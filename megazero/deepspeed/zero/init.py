"""`Init`: shard a model over the ranks while it is being built, so that no rank ever holds all of it.

The method is that of Rajbhandari et al. 2021, "ZeRO-Infinity", section 7.2.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.utils.hooks import RemovableHandle

from megazero.config.deepspeed.read import read_deepspeed
from megazero.deepspeed.comm.adopt import find_context
from megazero.deepspeed.comm.world import AnyGroup
from megazero.deepspeed.config.settings import JsonSource
from megazero.deepspeed.zero.partition import Builder, Partition, SliceStorage, can_be_sharded, partition_of
from megazero.errors import ConfigError
from megazero.mpu.context import ParallelContext
from megazero.mpu.group import Group
from megazero.mpu.torch_group import adopted_group

_MOST_OPEN = 4  # parameters that constructors keep gathered at a time
_DTYPES: Mapping[str | None, torch.dtype] = MappingProxyType({"bf16": torch.bfloat16, "fp16": torch.float16})


class DeepSpeedTensorOverride(Enum):
    """The properties of new tensors that `Init` may decide."""

    dtype = 1
    device = 2


class Init(Builder):
    """Context in which the parameters of each submodule are sharded as soon as the submodule has been built.

    A submodule counts as built when it becomes part of a larger module; all others are sharded at the end. A
    constructor may still read and write sharded weights: they are gathered meanwhile, and the first rank's
    values are kept. Code after the context must use `GatheredParameters`. Buffers are not sharded, `torch`'s
    functions are not patched, and parameters on the meta device stay there until they have values.

    Args:
        module: a finished module, which is sharded at once.
        data_parallel_group: the ranks to shard over, a group of torch's or ours; by default all ranks that
            hold the same parameters.
        remote_device: the device of slices until `initialize`: ``cpu``, or ``none`` for the rank's device;
            ``nvme`` means ``cpu`` here. By default the configuration's `offload_param.device`.
        pin_memory: whether slices on the host are in pinned memory.
        config_dict_or_path: path or content of a DeepSpeed JSON, which determines the dtype of the weights.
        config: another name for `config_dict_or_path`.
        enabled: False makes the context do nothing.
        dtype: dtype of the weights; takes precedence over the configuration. By default they keep theirs.
        mpu: see `find_context`.
        sequence_data_parallel_group: another name for `data_parallel_group`.
        tensor_overrides: members of `DeepSpeedTensorOverride`; without `dtype`, weights keep their dtype.
        mem_efficient_linear, zero_param_parallel_group, zero_quantized_weights, param_swapper,
        zero_quantized_nontrainable_weights: have no effect; the configuration decides how an engine gathers.

    Raises:
        ConfigError: the configuration is refused, or an argument contradicts another.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: AnyGroup = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: JsonSource | None = None,
        config: JsonSource | None = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: object = None,
        zero_param_parallel_group: object = None,
        zero_quantized_weights: bool = False,
        zero_quantized_nontrainable_weights: bool = False,
        sequence_data_parallel_group: AnyGroup = None,
        param_swapper: object = None,
        tensor_overrides: Iterable[DeepSpeedTensorOverride | str] | None = None,
    ):
        self.enabled = enabled
        if not enabled:
            return
        _warn_without_effect(
            zero_param_parallel_group=zero_param_parallel_group,
            zero_quantized_weights=zero_quantized_weights,
            zero_quantized_nontrainable_weights=zero_quantized_nontrainable_weights,
            param_swapper=param_swapper,
        )
        settings = _settings(config if config_dict_or_path is None else config_dict_or_path)
        group = _one_group(data_parallel_group, sequence_data_parallel_group)
        self.context = find_context(mpu)
        remote = remote_device or settings.get("offload.parameters")
        pin_memory = pin_memory or bool(settings.get("offload.pin_memory"))
        self._storage = _slice_storage(self.context, group, remote, pin_memory)
        self.dtype = dtype or _DTYPES.get(settings.get("precision.dtype"))
        if tensor_overrides is not None and "dtype" not in {getattr(x, "name", x) for x in tensor_overrides}:
            self.dtype = None
        self._unsharded: dict[int, nn.Module] = {}
        self._gathered: list[nn.Parameter] = []
        self._thread = 0
        self._hooks: list[RemovableHandle] = []
        if module is not None:
            self._shard(module)

    def __enter__(self) -> Init:
        if self.enabled:
            # Hooks are the process's, but ranks may be threads: each rank reacts to its own thread alone, and
            # the barriers keep a rank from adding or removing hooks while another one is building.
            self._thread = threading.get_ident()
            self._hooks = [
                register_module_parameter_registration_hook(self._note_module),
                register_module_module_registration_hook(self._shard_child),
            ]
            self.context.world.barrier()
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        if not self.enabled:
            return
        if kind is None:
            self.context.world.barrier()
        for hook in self._hooks:
            hook.remove()
        if kind is None:
            for module in self._unsharded.values():
                self._shard(module)
            self.close(self._gathered)
        self._hooks, self._unsharded, self._gathered = [], {}, []
        if kind is None:
            self.context.world.barrier()

    @property
    def active(self) -> bool:
        """Whether the context is entered."""
        return bool(self._hooks)

    def open(self, params: Sequence[nn.Parameter]) -> None:
        """Gather parameters until others need the memory or the context ends; every rank calls this."""
        # The oldest are sharded again first, so that the parameters of one call stay gathered together.
        room = max(0, _MOST_OPEN - len(params))
        self.close(self._gathered[: max(0, len(self._gathered) - room)])
        for param in params:
            partition = partition_of(param)
            assert partition is not None, "only sharded parameters are opened"
            partition.show(param)
            self._gathered.append(param)

    def close(self, params: Iterable[nn.Parameter]) -> None:
        """Shard the parameters that `open` has gathered; leave all others alone."""
        for param in list(params):
            partition = partition_of(param)
            if partition is not None and any(param is other for other in self._gathered):
                self._gathered = [other for other in self._gathered if other is not param]
                partition.take(param.data.to(self._storage.device))
                partition.hide(param)
                partition.mark(param)

    def _note_module(self, module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        """Record a module that has been given a parameter."""
        if threading.get_ident() == self._thread:
            self._unsharded[id(module)] = module

    def _shard_child(self, parent: nn.Module, name: str, child: nn.Module | None) -> None:
        """Shard a module that has become part of another."""
        if child is None or threading.get_ident() != self._thread:
            return
        self._unsharded.pop(id(child), None)
        self._unsharded[id(parent)] = parent
        self._shard(child)

    @torch.no_grad()
    def _shard(self, module: nn.Module) -> None:
        builder = self if self.active else None
        for param in module.parameters():
            if can_be_sharded(param):
                Partition(param, self._storage, self.dtype if param.is_floating_point() else None, builder)
            elif (partition := partition_of(param)) is not None and not partition.building:
                partition.builder = builder  # it was built in a context within this one


def _settings(config: JsonSource | None) -> Mapping[str, Any]:
    """The settings in a DeepSpeed JSON, by path."""
    if config is None:
        return {}
    read = read_deepspeed(config)
    if read.problems:
        raise ConfigError(read.problems)
    return read.values


def _warn_without_effect(**arguments: object) -> None:
    """Warn of arguments that were given and have no effect."""
    names = [name for name, value in arguments.items() if value]
    if names:
        warnings.warn(
            f"`zero.Init` makes nothing of {', '.join(names)}: how an engine gathers follows from its JSON",
            stacklevel=3,
        )


def _one_group(data: AnyGroup, sequence: AnyGroup) -> AnyGroup:
    """The group that was given, under one of its two names."""
    if data is not None and sequence is not None:
        raise ConfigError(
            "`data_parallel_group` must be given alone, but `sequence_data_parallel_group` is given too; "
            "leave that older name out"
        )
    return sequence if data is None else data


def _slice_storage(context: ParallelContext, given: AnyGroup, remote: str | None, pin: bool) -> SliceStorage:
    """The ranks to shard over, and the memory of slices."""
    device = getattr(remote, "value", remote) or "none"
    if device not in ("none", "cpu", "nvme", context.device.type):
        raise ConfigError(
            f"`remote_device` must be none, cpu or nvme, but is {device}; leave it out to keep slices on "
            f"{context.device}"
        )
    on_host = device in ("cpu", "nvme")
    group = context.replica
    if given is not None:
        group = given if isinstance(given, Group) else adopted_group(given)
        if set(group.ranks) == set(context.replica.ranks):
            group = context.replica
    return SliceStorage(
        group,
        context.device,
        torch.device("cpu") if on_host else context.device,
        pin=pin and on_host and context.device.type == "cuda",
    )


def zero_wrapper_for_fp_tensor_constructor(
    fn: Callable[..., Tensor],
    target_fp_dtype: torch.dtype | None = None,
    target_device: torch.device | None = None,
) -> Callable[..., Tensor]:
    """Wrap a constructor of tensors: a default device, and a type for floating-point tensors.

    `Init` patches no constructors; the name exists because transformers replaces it while it builds a model.
    """

    def wrapped(*args: object, **kwargs: object) -> Tensor:
        if kwargs.get("device") is None and target_device is not None:
            kwargs["device"] = target_device
        made = fn(*args, **kwargs)
        return made.to(target_fp_dtype) if target_fp_dtype and made.is_floating_point() else made

    return wrapped


def init_context() -> None:
    """Do nothing: `Init` patches no constructors that code outside of it would have to restore."""
