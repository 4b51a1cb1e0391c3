"""Helpers for modules: dotted attributes, construction on a device, profiler ranges, and versions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

import torch
from packaging import version
from torch import nn
from torch.overrides import TorchFunctionMode

from megazero.deepspeed.accelerator.choose import get_accelerator

_P = ParamSpec("_P")
_R = TypeVar("_R")


def recursive_getattr(model: nn.Module, module_name: str) -> Any:
    """The attribute at a dotted name, such as ``encoder.0.weight``."""
    return functools.reduce(getattr, module_name.split("."), model)


def recursive_setattr(model: nn.Module, module_name: str, module: object) -> None:
    """Set the attribute at a dotted name."""
    path, _, name = module_name.rpartition(".")
    setattr(recursive_getattr(model, path) if path else model, name, module)


def instrument_w_nvtx(func: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorate a function whose calls are ranges in the profiler, except under `torch.compile`."""

    @functools.wraps(func)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if torch.compiler.is_compiling():
            return func(*args, **kwargs)
        device = get_accelerator()
        device.range_push(func.__qualname__)
        try:
            return func(*args, **kwargs)
        finally:
            device.range_pop()

    return call


class OnDevice(TorchFunctionMode):
    """Context in which new tensors, and so modules, get a device and a floating-point type.

    Args:
        dtype: the type of floating-point tensors.
        device: the device of tensors that are made without one; ``meta`` allocates no memory.
        enabled: False makes the context do nothing.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device | str = "meta", enabled: bool = True):
        super().__init__()
        self.dtype, self.device, self.enabled = dtype, device, enabled

    def __enter__(self) -> OnDevice:
        if self.enabled:
            super().__enter__()  # type: ignore[no-untyped-call]  # torch does not annotate it
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.enabled:
            super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]  # torch does not annotate it

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        kwargs = dict(kwargs or {})
        if func in (torch.empty, torch.zeros, torch.ones, torch.full):
            if kwargs.get("device") is None:
                kwargs["device"] = self.device
            made = func(*args, **kwargs)
            return made.to(self.dtype) if made.is_floating_point() else made
        return func(*args, **kwargs)


def required_torch_version(
    min_version: float | str | None = None, max_version: float | str | None = None
) -> bool:
    """Whether torch's version is within bounds, both inclusive."""
    own = version.parse(torch.__version__)
    lowest = min_version is None or version.parse(str(min_version)) <= own
    return lowest and (max_version is None or own <= version.parse(str(max_version)))


def is_compile_supported() -> bool:
    """Whether torch can compile, which every supported version can."""
    return True


def is_compiling() -> bool:
    """Whether torch is compiling this code."""
    return torch.compiler.is_compiling()


def disable(func: Callable[_P, _R]) -> Callable[_P, _R]:
    """Exclude a function from `torch.compile`."""
    return torch.compiler.disable(func)  # type: ignore[no-any-return]  # torch does not annotate it


def get_default_autocast_lower_precision_modules() -> list[str]:
    """DeepSpeed's default `torch_autocast.lower_precision_safe_modules`: names of module classes."""
    return [f"torch.nn.modules.{name}" for name in ("linear.Linear", *(f"conv.Conv{d}d" for d in (1, 2, 3)))]
