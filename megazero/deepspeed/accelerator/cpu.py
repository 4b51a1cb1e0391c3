"""The calls of an accelerator, as the CPU answers them.

Memory is this process's resident memory, and there are no streams, events or graphs.
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


def _always(value: Any, what: str) -> Any:
    """A method that gives this value, whatever it is asked; the docstring is `what`."""

    def answer(self: Accelerator, *args: Any, **kwargs: Any) -> Any:
        return value

    answer.__doc__ = what
    return answer


class _Devices:
    """Names and numbers of devices."""

    set_device = _always(None, "Make it this process's device.")
    synchronize = _always(None, "Wait until the device has nothing to do.")
    is_available = _always(True, "Whether there is such a device.")
    communication_backend_version = _always(None, "The version of that library, if it says so.")

    _name = "cpu"
    _backend = "gloo"

    def device_name(self, device_index: int | None = None) -> str:
        """``cpu``; or ``cuda``, with its number if there is one."""
        return self._name

    def name(self) -> str:
        """``cpu`` or ``cuda``."""
        return self._name

    def device(self, device_index: int | None = None) -> torch.device:
        """The device, also as a context in which tensors are made on it."""
        return torch.device(self._name)

    def current_device(self) -> int:
        """The number of this process's device."""
        text = os.environ.get("LOCAL_RANK", "0")
        return int(text) if text.isdigit() else 0

    def current_device_name(self) -> str:
        """The name of this process's device."""
        return self._name

    def device_count(self) -> int:
        """The number of devices of this host; on the CPU LOCAL_SIZE, or that of its memory nodes."""
        size = os.environ.get("LOCAL_SIZE", "")
        nodes = len(list(Path("/sys/devices/system/node").glob("node[0-9]*")))
        return int(size) if size.isdigit() and int(size) else max(1, nodes)

    def on_accelerator(self, tensor: Tensor) -> bool:
        """Whether a tensor is on such a device."""
        return tensor.device.type == self._name

    def communication_backend_name(self) -> str:
        """The library through which ranks of such devices talk."""
        return self._backend


class _RandomNumbers:
    """The device's random number generator."""

    _random: ModuleType = torch

    def random(self) -> ModuleType:
        """`torch.random`."""
        return torch.random

    def set_rng_state(self, new_state: Tensor, device_index: int | None = None) -> None:
        """Continue from a state."""
        self._random.set_rng_state(new_state, *self._place(device_index))

    def get_rng_state(self, device_index: int | None = None) -> Tensor:
        """The state now."""
        state: Tensor = self._random.get_rng_state(*self._place(device_index))
        return state

    def manual_seed(self, seed: int) -> None:
        """Seed this device's generator."""
        self._random.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        """Seed the generators of all devices."""
        getattr(self._random, "manual_seed_all", self._random.manual_seed)(seed)

    def initial_seed(self) -> int:
        """The seed that was last set."""
        return int(self._random.initial_seed())

    def default_generator(self, device_index: int) -> torch.Generator:
        """The device's generator."""
        return torch.default_generator

    def _place(self, device_index: int | None) -> tuple[int, ...]:
        return ()


class _Streams:
    """Streams, events, graphs and the marks of a profiler: none on the CPU."""

    stream = _always(nullcontext(), "The context of a stream.")
    current_stream = _always(None, "The stream that work goes to.")
    default_stream = _always(None, "The stream that is there from the start.")
    create_graph = _always(None, "An empty graph of calls.")
    capture_to_graph = _always(nullcontext(), "The context whose calls a graph captures.")
    replay_graph = _always(None, "Make a graph's calls again.")
    range_push = _always(None, "Begin a range in the profiler's picture.")
    range_pop = _always(None, "End that range.")

    Stream: Any = None
    Event: Any = None

    def lazy_call(self, callback: Callable[[], Any]) -> Any:
        """Call it as soon as the device is in use."""
        return callback()

    def is_synchronized_device(self) -> bool:
        """Whether a call ends only when its work is done."""
        return self.Event is None

    use_host_timers = resolves_data_dependency = handles_memory_backpressure = is_synchronized_device


class _Memory:
    """The device's memory in bytes; on the CPU this process's."""

    empty_cache = _always(None, "Give memory that no tensor uses back to the device.")

    _peak = 0

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Memory that tensors use; on the CPU that of the process."""
        used = _resident()
        self._peak = max(self._peak, used)
        return used

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """The most that was seen since the last reset."""
        self.memory_allocated()
        return self._peak

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        """Forget the peak."""
        self._peak = _resident()

    def memory_reserved(self, device_index: int | None = None) -> int:
        """Memory that tensors use or that is kept for them."""
        return self.memory_allocated()

    def max_memory_reserved(self, device_index: int | None = None) -> int:
        """The most that was reserved since the last reset."""
        return self.max_memory_allocated()

    def memory_stats(self, device_index: int | None = None) -> dict[str, int]:
        """The allocator's figures."""
        current = self.memory_allocated()
        return {"allocated_bytes.all.current": current, "allocated_bytes.all.peak": self._peak}

    def total_memory(self, device_index: int | None = None) -> int:
        """Memory of the device."""
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def available_memory(self, device_index: int | None = None) -> int:
        """Memory that is still free."""
        return available_memory()

    # Older names.
    def memory_cached(self, device_index: int | None = None) -> int:
        """`memory_reserved`."""
        return self.memory_reserved(device_index)

    def max_memory_cached(self, device_index: int | None = None) -> int:
        """`max_memory_reserved`."""
        return self.max_memory_reserved(device_index)

    def reset_max_memory_cached(self, device_index: int | None = None) -> None:
        """`reset_peak_memory_stats`."""
        self.reset_peak_memory_stats(device_index)

    reset_max_memory_allocated = reset_max_memory_cached


class _Types:
    """Types of tensors, and which of them the device computes with."""

    is_bf16_supported = _always(True, "Whether the device computes with bf16.")
    is_fp16_supported = _always(True, "Whether the device computes with fp16.")
    is_triton_supported = _always(False, "Whether Triton compiles for the device.")
    amp = _always(torch.amp, "The module with the device's `autocast`.")

    BFloat16Tensor: Any = torch.BFloat16Tensor
    ByteTensor: Any = torch.ByteTensor
    DoubleTensor: Any = torch.DoubleTensor
    FloatTensor: Any = torch.FloatTensor
    HalfTensor: Any = torch.HalfTensor
    IntTensor: Any = torch.IntTensor
    LongTensor: Any = torch.LongTensor

    def supported_dtypes(self) -> list[torch.dtype]:
        """The floating-point types that the device computes with."""
        half = [torch.float16] if self.is_fp16_supported() else []
        return [torch.float32, *half, *([torch.bfloat16] if self.is_bf16_supported() else [])]


class _Surroundings:
    """Pinned memory, operators, compilers and environment variables."""

    op_builder_dir = _always("deepspeed.ops.op_builder", "The module of the operators' builders.")

    _visible = ("CUDA_VISIBLE_DEVICES",)
    _compiler = "inductor"

    def pin_memory(self, tensor: Tensor, make_copy: bool = True, match_shape: bool = True) -> Tensor:
        """The tensor in memory from which the device copies by itself."""
        return tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        """Whether a tensor is in such memory."""
        return tensor.is_pinned()

    def get_op_builder(self, class_name: str) -> type[op_builder.OpBuilder]:
        """The builder of this name."""
        return op_builder.builder_class(class_name)

    def create_op_builder(self, class_name: str) -> op_builder.OpBuilder:
        """A builder of this name."""
        return self.get_op_builder(class_name)()

    def build_extension(self) -> Any:
        """The command with which `setup.py` builds extensions of torch."""
        from torch.utils.cpp_extension import BuildExtension

        return BuildExtension

    def export_envs(self) -> list[str]:
        """The beginnings of environment variables that a launcher passes on."""
        return []

    def visible_devices_envs(self) -> list[str]:
        """The environment variables that choose devices."""
        return list(self._visible)

    def set_visible_devices_envs(
        self, current_env: MutableMapping[str, str], local_accelerator_ids: Sequence[int]
    ) -> None:
        """Choose devices in an environment."""
        for name in self._visible:
            current_env[name] = ",".join(map(str, local_accelerator_ids))

    def get_compile_backend(self) -> str:
        """The compiler that `torch.compile` uses."""
        return self._compiler

    def set_compile_backend(self, backend: str) -> None:
        """Choose the compiler that `torch.compile` uses.

        Raises:
            ConfigError: torch has no such compiler.
        """
        known = torch._dynamo.list_backends(exclude_tags=())
        if backend not in known:
            raise ConfigError(f"`backend` must be one of {', '.join(known)}, but is {backend}; choose one")
        self._compiler = backend


class Accelerator(_Devices, _RandomNumbers, _Streams, _Memory, _Types, _Surroundings):
    """The CPU."""


def _resident() -> int:
    """Bytes of memory that this process has now; off Linux the most that it ever had."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return pages * os.sysconf("SC_PAGE_SIZE")
