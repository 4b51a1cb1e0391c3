"""`Init`: shards a model over the ranks while it is being built, so that no rank ever holds all of it.

The names and their meaning are DeepSpeed's (`deepspeed.zero.Init`, `GatheredParameters`,
`register_external_parameter`), so that a script needs no change; the method is that of Rajbhandari et al.
2021, "ZeRO-Infinity", section 7.2.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from megazero.config.deepspeed.read import read_deepspeed
from megazero.deepspeed.comm.adopt import find_context
from megazero.deepspeed.config.settings import JsonSource
from megazero.deepspeed.zero.partition import Builder, Partition, Shelf, can_be_sharded, partition_of
from megazero.errors import ConfigError
from megazero.mpu.context import ParallelContext
from megazero.mpu.torch_group import adopted_group

_MOST_OPEN = 4  # parameters that a constructor may have made whole at a time
_DTYPES: Mapping[str | None, torch.dtype] = MappingProxyType({"bf16": torch.bfloat16, "fp16": torch.float16})


class Init(Builder):
    """Context in which the parameters of each submodule are sharded as soon as the submodule has been built.

    A submodule counts as built when it becomes part of a larger module; everything else is sharded at the
    end. A constructor may go on to read and write sharded weights, as it may without the context: they are
    whole for a while, and the first rank's values count. Code after the context must do so within
    `GatheredParameters`. Buffers stay as they are, as do `torch`'s functions, `Module.apply` included.
    Parameters on the meta device are left alone until they have values.

    Args:
        module: a finished module, which is sharded at once.
        data_parallel_group: the ranks to shard over, a group of torch's or ours; default: all ranks that hold
            the same parameters.
        mem_efficient_linear: no effect, as a linear layer keeps no second copy of its weights here.
        remote_device: where slices are kept until `initialize` decides: ``cpu``, or ``none`` for the device;
            ``nvme`` stands for ``cpu`` here. Default: the configuration's `offload_param.device`.
        pin_memory: whether slices on the host are in locked memory.
        config_dict_or_path: path or content of a DeepSpeed JSON, which determines the dtype of the weights.
        config: another name for `config_dict_or_path`.
        enabled: if False, nothing happens.
        dtype: dtype of the weights; takes precedence over the configuration. Default: the one they have.
        mpu: see `find_context`.
        zero_param_parallel_group: no effect; `zero_hpz_partition_size` in the configuration makes the group.
        zero_quantized_weights: no effect; the configuration decides how an engine gathers.
        zero_quantized_nontrainable_weights: no effect, likewise.
        sequence_data_parallel_group: another name for `data_parallel_group`.
        param_swapper: no effect; slices go to disk when `initialize` moves them there.
        tensor_overrides: members of `DeepSpeedTensorOverride`; without `dtype` the weights keep theirs.

    Raises:
        ConfigError: the configuration is refused, or an argument contradicts another.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: JsonSource | None = None,
        config: JsonSource | None = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        zero_param_parallel_group: Any = None,
        zero_quantized_weights: bool = False,
        zero_quantized_nontrainable_weights: bool = False,
        sequence_data_parallel_group: Any = None,
        param_swapper: Any = None,
        tensor_overrides: Iterable[Any] | None = None,
    ):
        self.enabled = enabled
        if not enabled:
            return
        _say_without_effect(
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
        self._shelf = _shelf(self.context, group, remote, pin_memory)
        self.dtype = dtype or _DTYPES.get(settings.get("precision.dtype"))
        if tensor_overrides is not None and "dtype" not in {getattr(x, "name", x) for x in tensor_overrides}:
            self.dtype = None
        self._pending: dict[int, nn.Module] = {}
        self._whole: list[nn.Parameter] = []
        self._thread = 0
        self._hooks: list[Any] = []
        if module is not None:
            self._cut(module)

    def __enter__(self) -> Init:
        if self.enabled:
            # Hooks belong to the process, but ranks may be its threads: each rank reacts only to its own
            # thread, and none adds or removes a hook while another is building.
            self._thread = threading.get_ident()
            self._hooks = [
                register_module_parameter_registration_hook(self._met),
                register_module_module_registration_hook(self._registered),
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
            for module in self._pending.values():
                self._cut(module)
            self.close(self._whole)
        self._hooks, self._pending, self._whole = [], {}, []
        if kind is None:
            self.context.world.barrier()

    @property
    def active(self) -> bool:
        """Whether the context has begun and not ended."""
        return bool(self._hooks)

    def open(self, params: Sequence[nn.Parameter]) -> None:
        """Make these parameters whole, until others are needed or the context ends; every rank calls this."""
        # The oldest ones are sharded again first: what the caller needs together must stay.
        room = max(0, _MOST_OPEN - len(params))
        self.close(self._whole[: max(0, len(self._whole) - room)])
        for param in params:
            home = partition_of(param)
            assert home is not None, "only sharded parameters are opened"
            home.show(param)
            self._whole.append(param)

    def close(self, params: Iterable[nn.Parameter]) -> None:
        """Shard those of these parameters that `open` made whole."""
        for param in list(params):
            home = partition_of(param)
            if home is not None and any(param is other for other in self._whole):
                self._whole = [other for other in self._whole if other is not param]
                home.take(param.data.to(self._shelf.device))
                home.hide(param)
                home.mark(param)

    def _met(self, module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        """Note a module that has got a parameter."""
        if threading.get_ident() == self._thread:
            self._pending[id(module)] = module

    def _registered(self, parent: nn.Module, name: str, child: nn.Module | None) -> None:
        """Shard a module that has become part of another."""
        if child is None or threading.get_ident() != self._thread:
            return
        self._pending.pop(id(child), None)
        self._pending[id(parent)] = parent
        self._cut(child)

    @torch.no_grad()
    def _cut(self, module: nn.Module) -> None:
        builder = self if self.active else None
        for param in module.parameters():
            if can_be_sharded(param):
                Partition(param, self._shelf, self.dtype if param.is_floating_point() else None, builder)
            elif (home := partition_of(param)) is not None and not home.building:
                home.builder = builder  # it was built in a context within this one


def _settings(config: JsonSource | None) -> Mapping[str, Any]:
    """The settings in a DeepSpeed JSON."""
    if config is None:
        return {}
    read = read_deepspeed(config)
    if read.problems:
        raise ConfigError(read.problems)
    return read.values


def _say_without_effect(**given: Any) -> None:
    """Warn of arguments that were given and change nothing."""
    names = [name for name, value in given.items() if value]
    if names:
        warnings.warn(
            f"`zero.Init` makes nothing of {', '.join(names)}: how an engine gathers follows from its JSON",
            stacklevel=3,
        )


def _one_group(data: Any, sequence: Any) -> Any:
    """The group that was given under either name."""
    if data is not None and sequence is not None:
        raise ConfigError(
            "`data_parallel_group` must be given alone, but `sequence_data_parallel_group` is given too; "
            "leave that older name out"
        )
    return sequence if data is None else data


def _shelf(context: ParallelContext, given: Any, remote: str | None, pin: bool) -> Shelf:
    """Where slices are kept, and which ranks share a parameter."""
    place = getattr(remote, "value", remote) or "none"
    if place not in ("none", "cpu", "nvme", context.device.type):
        raise ConfigError(
            f"`remote_device` must be none, cpu or nvme, but is {place}; leave it out to keep slices on "
            f"{context.device}"
        )
    on_host = place in ("cpu", "nvme")
    group = context.replica
    if given is not None:
        group = given if hasattr(given, "all_gather") else adopted_group(given)
        if set(group.ranks) == set(context.replica.ranks):
            group = context.replica
    return Shelf(
        group,
        context.device,
        torch.device("cpu") if on_host else context.device,
        pin=pin and on_host and context.device.type == "cuda",
    )
