"""The engine that `init_inference` returns."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from megazero.deepspeed.comm.mpu import DeepSpeedMpu
from megazero.deepspeed.legacy.inference.config import DeepSpeedInferenceConfig
from megazero.errors import DataError, MegazeroError
from megazero.mpu.context import ParallelContext
from megazero.mpu.launch import close_groups


class InferenceEngine(nn.Module):
    """Wraps a module for inference; attributes that the engine lacks are the module's.

    Attributes:
        module: the module, on its device and in its dtype, or this rank's slice of it.
        injected: the number of replaced modules by class name, see `inject`.

    Args:
        model: the module.
        config: the configuration.
        context: the ranks that the module is sliced over; None if it is whole.
        injected: see above.
        generate: continues prompts; None if the module cannot generate.
    """

    def __init__(
        self,
        model: nn.Module,
        config: DeepSpeedInferenceConfig,
        context: ParallelContext | None,
        injected: dict[str, int],
        generate: Callable[..., object] | None,
    ):
        super().__init__()
        self.module = model
        self._config, self._context = config, context
        self._borrowed = isinstance(config.tensor_parallel.mpu, (ParallelContext, DeepSpeedMpu))
        self.injected = injected
        self._times: list[float] | None = None
        self._hooks: list[RemovableHandle] = []
        self._inner_generate = generate
        if generate is not None:
            self.generate = self._generate

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    @property
    def mp_world_size(self) -> int:
        """The number of ranks that the module is sliced over."""
        return 1 if self._context is None else self._context.tp.size

    def forward(self, *inputs: object, **kwargs: object) -> Any:
        """Call the module."""
        return self.module(*inputs, **kwargs)

    def _generate(self, *inputs: object, **kwargs: object) -> Any:
        """Call the module's `generate`; all ranks of a sliced module pass the same prompts."""
        prompts = kwargs.get("input_ids", inputs[0] if inputs else None)
        if isinstance(prompts, Tensor) and prompts.shape[-1] > self._config.max_out_tokens:
            raise DataError(
                f"a prompt must have at most `max_out_tokens` ({self._config.max_out_tokens}) tokens, but "
                f"has {prompts.shape[-1]}; raise `max_out_tokens`"
            )
        assert self._inner_generate is not None, "`generate` is set only if the module can generate"
        return self._inner_generate(*inputs, **kwargs)

    def profile_model_time(self, use_cuda_events: bool = True) -> None:
        """Start to measure each forward of the module.

        Args:
            use_cuda_events: has no effect; the device is synchronized before and after.
        """
        if self._times is not None:
            return
        self._times = []
        started: list[float] = []

        def begin(module: nn.Module, args: object) -> None:
            started.append(_now())

        def end(module: nn.Module, args: object, output: object) -> None:
            assert self._times is not None
            self._times.append((_now() - started.pop()) * 1000)

        self._hooks = [self.module.register_forward_pre_hook(begin), self.module.register_forward_hook(end)]

    def model_times(self) -> list[float]:
        """Return the milliseconds of each forward since the last call.

        Raises:
            MegazeroError: `profile_model_time` has not been called.
        """
        if self._times is None:
            raise MegazeroError("`model_times` must follow `profile_model_time`, which was not called")
        times, self._times = self._times, []
        return times

    def compile(self, *args: object, **kwargs: Any) -> None:
        """Compile the module by `nn.Module.compile`; `compile_kwargs` are further keyword arguments."""
        self.module.compile(*args, **{**kwargs.pop("compile_kwargs", {}), **kwargs})

    def destroy(self) -> None:
        """Stop measuring, and close the groups that were opened for this engine."""
        for hook in self._hooks:
            hook.remove()
        self._times, self._hooks = None, []
        if self._context is not None and not self._borrowed:
            close_groups(self._context)
        self._context = None


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
