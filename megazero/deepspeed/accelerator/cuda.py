"""The accelerator interface for CUDA devices, by `torch.cuda`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from megazero.deepspeed.accelerator.cpu import Accelerator


def _call(name: str) -> Any:
    """Make a method that calls a function of `torch.cuda`."""

    def method(self: Accelerator) -> object:
        return getattr(torch.cuda, name)()

    return method


def _call_on_device(name: str) -> Any:
    """Make a method that calls a function of `torch.cuda` with the index of a device."""

    def method(self: Accelerator, device_index: int | None = None) -> object:
        return getattr(torch.cuda, name)(device_index)

    return method


def _constructor(dtype: torch.dtype) -> Callable[..., Tensor]:
    return functools.partial(torch.tensor, dtype=dtype, device="cuda")


class _CudaDevice(Accelerator):
    """The devices and their memory."""

    _name, _backend, _random = "cuda", "nccl", torch.cuda
    BFloat16Tensor, HalfTensor = _constructor(torch.bfloat16), _constructor(torch.float16)
    DoubleTensor, FloatTensor = _constructor(torch.float64), _constructor(torch.float32)
    IntTensor, LongTensor = _constructor(torch.int32), _constructor(torch.int64)
    ByteTensor = _constructor(torch.uint8)
    current_device, device_count = _call("current_device"), _call("device_count")
    is_available, empty_cache = _call("is_available"), _call("empty_cache")
    set_device, synchronize = _call_on_device("set_device"), _call_on_device("synchronize")
    memory_allocated, memory_reserved = (
        _call_on_device("memory_allocated"),
        _call_on_device("memory_reserved"),
    )
    max_memory_allocated = _call_on_device("max_memory_allocated")
    max_memory_reserved = _call_on_device("max_memory_reserved")
    memory_stats, reset_peak_memory_stats = (
        _call_on_device("memory_stats"),
        _call_on_device("reset_peak_memory_stats"),
    )

    def device_name(self, device_index: int | None = None) -> str:
        return "cuda" if device_index is None else f"cuda:{device_index}"

    def device(self, device_index: int | None = None) -> torch.device:
        return torch.device(self.device_name(device_index))

    def current_device_name(self) -> str:
        return f"cuda:{torch.cuda.current_device()}"

    def communication_backend_version(self) -> tuple[int, ...] | None:
        return tuple(torch.cuda.nccl.version())

    def default_generator(self, device_index: int) -> torch.Generator:
        generator: torch.Generator = torch.cuda.default_generators[device_index]
        return generator

    def total_memory(self, device_index: int | None = None) -> int:
        return torch.cuda.mem_get_info(device_index)[1]

    def available_memory(self, device_index: int | None = None) -> int:
        return torch.cuda.mem_get_info(device_index)[0]

    def pin_memory(self, tensor: Tensor, make_copy: bool = True, match_shape: bool = True) -> Tensor:
        return tensor.pin_memory()

    def export_envs(self) -> list[str]:
        return ["NCCL"]

    def _index(self, device_index: int | None) -> tuple[int, ...]:
        return () if device_index is None else (device_index,)


class CudaAccelerator(_CudaDevice):
    """This process's CUDA device."""

    Stream, Event = torch.cuda.Stream, torch.cuda.Event
    current_stream, default_stream = _call_on_device("current_stream"), _call_on_device("default_stream")
    create_graph = _call("CUDAGraph")

    def stream(self, stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
        return torch.cuda.stream(stream)

    def capture_to_graph(
        self, graph: torch.cuda.CUDAGraph, pool: Any = None, stream: torch.cuda.Stream | None = None
    ) -> AbstractContextManager[object]:
        return torch.cuda.graph(graph, pool, stream)

    def replay_graph(self, graph: torch.cuda.CUDAGraph) -> None:
        graph.replay()

    def range_push(self, msg: str, domain: str | None = None, category: str | None = None) -> None:
        torch.cuda.nvtx.range_push(msg)

    def range_pop(self, domain: str | None = None) -> None:
        torch.cuda.nvtx.range_pop()

    def lazy_call(self, callback: Callable[[], object]) -> object:
        return torch.cuda._lazy_call(callback)

    def is_bf16_supported(self) -> bool:
        return bool(torch.cuda.is_bf16_supported())

    def is_fp16_supported(self) -> bool:
        return torch.cuda.get_device_capability() >= (7, 0)

    def is_triton_supported(self) -> bool:
        return torch.cuda.get_device_capability() >= (8, 0)
