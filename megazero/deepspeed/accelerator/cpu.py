"""The accelerator interface for the CPU.

Memory is the resident memory of this process, and there are no streams, events or graphs.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable, MutableMapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from megazero.deepspeed.accelerator import op_builder
from megazero.errors import ConfigError
from megazero.host_memory import available_memory

_Constructor = Callable[..., Tensor]


def _always(value: object, docstring: str) -> Any:
    """Make a method that returns `value` for all arguments."""

    def method(self: Accelerator, *args: object, **kwargs: object) -> object:
        return value

    method.__doc__ = docstring
    return method


class _DeviceCalls:
    """The devices of this host."""

    set_device = _always(None, "Set this process's device.")
    synchronize = _always(None, "Wait until all work on the device is done.")
    is_available = _always(True, "Whether there is a device of this type.")
    communication_backend_version = _always(None, "The version of the communication library, if known.")

    _name = "cpu"
    _backend = "gloo"

    def device_name(self, device_index: int | None = None) -> str:
        """Return ``cpu``, or ``cuda`` with the index if one is given."""
        return self._name

    def name(self) -> str:
        """Return ``cpu`` or ``cuda``."""
        return self._name

    def device(self, device_index: int | None = None) -> torch.device:
        """Return the device, which is also a context for new tensors."""
        return torch.device(self._name)

    def current_device(self) -> int:
        """Return the index of this process's device."""
        text = os.environ.get("LOCAL_RANK", "0")
        return int(text) if text.isdigit() else 0

    def current_device_name(self) -> str:
        """Return the name of this process's device."""
        return self._name

    def device_count(self) -> int:
        """Return the number of devices of this host; on the CPU, LOCAL_SIZE or the number of NUMA nodes."""
        size = os.environ.get("LOCAL_SIZE", "")
        nodes = len(list(Path("/sys/devices/system/node").glob("node[0-9]*")))
        return int(size) if size.isdigit() and int(size) else max(1, nodes)

    def on_accelerator(self, tensor: Tensor) -> bool:
        """Whether a tensor is on a device of this type."""
        return tensor.device.type == self._name

    def communication_backend_name(self) -> str:
        """Return the communication library for such devices."""
        return self._backend


class _RandomCalls:
    """The device's random number generator."""

    _random: ModuleType = torch

    def random(self) -> ModuleType:
        """Return `torch.random`."""
        return torch.random

    def set_rng_state(self, new_state: Tensor, device_index: int | None = None) -> None:
        """Set the generator's state."""
        self._random.set_rng_state(new_state, *self._index(device_index))

    def get_rng_state(self, device_index: int | None = None) -> Tensor:
        """Return the generator's state."""
        state: Tensor = self._random.get_rng_state(*self._index(device_index))
        return state

    def manual_seed(self, seed: int) -> None:
        """Seed the generator of this device."""
        self._random.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        """Seed the generators of all devices."""
        getattr(self._random, "manual_seed_all", self._random.manual_seed)(seed)

    def initial_seed(self) -> int:
        """Return the last seed."""
        return int(self._random.initial_seed())

    def default_generator(self, device_index: int) -> torch.Generator:
        """Return the device's generator."""
        return torch.default_generator

    def _index(self, device_index: int | None) -> tuple[int, ...]:
        """Return the index as the argument of torch's functions, which take none on the CPU."""
        return ()


class _StreamCalls:
    """Streams, events, graphs and profiler ranges, none of which exist on the CPU."""

    stream = _always(nullcontext(), "A context that selects a stream.")
    current_stream = _always(None, "The current stream.")
    default_stream = _always(None, "The default stream.")
    create_graph = _always(None, "Make an empty graph.")
    capture_to_graph = _always(nullcontext(), "A context whose work a graph captures.")
    replay_graph = _always(None, "Replay a graph.")
    range_push = _always(None, "Start a profiler range.")
    range_pop = _always(None, "End a profiler range.")

    Stream: type[torch.cuda.Stream] | None = None
    Event: type[torch.cuda.Event] | None = None

    def lazy_call(self, callback: Callable[[], object]) -> object:
        """Call a function once the device is initialized."""
        return callback()

    def is_synchronized_device(self) -> bool:
        """Whether calls return only after their work is done."""
        return self.Event is None

    use_host_timers = resolves_data_dependency = handles_memory_backpressure = is_synchronized_device


class _MemoryCalls:
    """The device's memory in bytes; on the CPU this process's."""

    empty_cache = _always(None, "Return unused cached memory to the device.")

    _peak = 0

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Return the memory of tensors; on the CPU, of this process."""
        used = _resident()
        self._peak = max(self._peak, used)
        return used

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """Return the peak of `memory_allocated` since the last reset."""
        self.memory_allocated()
        return self._peak

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        """Reset the peak."""
        self._peak = _resident()

    def memory_reserved(self, device_index: int | None = None) -> int:
        """Return the memory of tensors and of the allocator's cache."""
        return self.memory_allocated()

    def max_memory_reserved(self, device_index: int | None = None) -> int:
        """Return the peak of `memory_reserved` since the last reset."""
        return self.max_memory_allocated()

    def memory_stats(self, device_index: int | None = None) -> dict[str, int]:
        """Return the allocator's statistics."""
        current = self.memory_allocated()
        return {"allocated_bytes.all.current": current, "allocated_bytes.all.peak": self._peak}

    def total_memory(self, device_index: int | None = None) -> int:
        """Return the memory of the device."""
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def available_memory(self, device_index: int | None = None) -> int:
        """Return the free memory of the device."""
        return available_memory()

    # Older names.
    def memory_cached(self, device_index: int | None = None) -> int:
        """Return `memory_reserved`."""
        return self.memory_reserved(device_index)

    def max_memory_cached(self, device_index: int | None = None) -> int:
        """Return `max_memory_reserved`."""
        return self.max_memory_reserved(device_index)

    def reset_max_memory_cached(self, device_index: int | None = None) -> None:
        """Call `reset_peak_memory_stats`."""
        self.reset_peak_memory_stats(device_index)

    reset_max_memory_allocated = reset_max_memory_cached


class _DtypeCalls:
    """Tensor types, and the dtypes that the device supports."""

    is_bf16_supported = _always(True, "Whether the device supports bf16.")
    is_fp16_supported = _always(True, "Whether the device supports fp16.")
    is_triton_supported = _always(False, "Whether Triton supports the device.")
    amp = _always(torch.amp, "The module with the device's `autocast`.")

    BFloat16Tensor: _Constructor = torch.BFloat16Tensor
    ByteTensor: _Constructor = torch.ByteTensor
    DoubleTensor: _Constructor = torch.DoubleTensor
    FloatTensor: _Constructor = torch.FloatTensor
    HalfTensor: _Constructor = torch.HalfTensor
    IntTensor: _Constructor = torch.IntTensor
    LongTensor: _Constructor = torch.LongTensor

    def supported_dtypes(self) -> list[torch.dtype]:
        """Return the floating-point dtypes that the device supports."""
        half = [torch.float16] if self.is_fp16_supported() else []
        return [torch.float32, *half, *([torch.bfloat16] if self.is_bf16_supported() else [])]


class _HostCalls:
    """Pinned memory, operators, compilers and environment variables."""

    op_builder_dir = _always("deepspeed.ops.op_builder", "The module of the operators' builders.")

    _visible = ("CUDA_VISIBLE_DEVICES",)
    _compiler = "inductor"

    def pin_memory(self, tensor: Tensor, make_copy: bool = True, match_shape: bool = True) -> Tensor:
        """Return the tensor in pinned memory."""
        return tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        """Whether a tensor is in pinned memory."""
        return tensor.is_pinned()

    def get_op_builder(self, class_name: str) -> type[op_builder.OpBuilder]:
        """Return the class of a builder."""
        return op_builder.builder_class(class_name)

    def create_op_builder(self, class_name: str) -> op_builder.OpBuilder:
        """Make a builder."""
        return self.get_op_builder(class_name)()

    def build_extension(self) -> type:
        """Return the setuptools command that builds extensions of torch."""
        from torch.utils.cpp_extension import BuildExtension

        return BuildExtension

    def export_envs(self) -> list[str]:
        """Return the prefixes of environment variables that a launcher passes on."""
        return []

    def visible_devices_envs(self) -> list[str]:
        """Return the environment variables that select devices."""
        return list(self._visible)

    def set_visible_devices_envs(
        self, current_env: MutableMapping[str, str], local_accelerator_ids: Sequence[int]
    ) -> None:
        """Select devices in an environment."""
        for name in self._visible:
            current_env[name] = ",".join(map(str, local_accelerator_ids))

    def get_compile_backend(self) -> str:
        """Return the backend of `torch.compile`."""
        return self._compiler

    def set_compile_backend(self, backend: str) -> None:
        """Set the backend of `torch.compile`.

        Raises:
            ConfigError: the backend is unknown.
        """
        known = torch._dynamo.list_backends(exclude_tags=())
        if backend not in known:
            raise ConfigError(f"`backend` must be one of {', '.join(known)}, but is {backend}; choose one")
        self._compiler = backend


class Accelerator(_DeviceCalls, _RandomCalls, _StreamCalls, _MemoryCalls, _DtypeCalls, _HostCalls):
    """The CPU."""


def _resident() -> int:
    """Return the resident bytes of this process; their peak on systems without /proc."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return pages * os.sysconf("SC_PAGE_SIZE")
