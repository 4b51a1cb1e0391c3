"""The FLOPs profiler by DeepSpeed's names, for any model, over `account/profilers/flops`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import nn

from megazero.account.profilers.clock import clock_of
from megazero.account.profilers.flops.counter import (
    ModuleCounter,
    ModuleProfile,
    fill_containers,
    profiles_of,
)
from megazero.account.profilers.flops.table import largest_types, module_tree, rows_of
from megazero.account.profilers.flops.units import (
    bytes_to_string,
    duration_to_string,
    flops_to_string,
    macs_to_string,
    number_to_string,
    params_to_string,
)
from megazero.deepspeed.accelerator.choose import get_accelerator
from megazero.errors import ConfigError

__all__ = [
    "FlopsProfiler",
    "bytes_to_string",
    "duration_to_string",
    "flops_to_string",
    "get_model_profile",
    "macs_to_string",
    "number_to_string",
    "params_to_string",
]


class FlopsProfiler:
    """Profiles the forward pass of a module, from `start_profile` to `end_profile`.

    Attributes:
        flops, macs, params: the totals of the last profile that was stopped.

    Args:
        model: the module.
        ds_engine: the engine around the module, for the header of the printed report.
        recompute_fwd_factor: the fraction of the forward pass that backward recomputes; only an attribute.
    """

    def __init__(self, model: nn.Module, ds_engine: Any = None, recompute_fwd_factor: float = 0.0):
        self.model, self.ds_engine, self.recompute_fwd_factor = model, ds_engine, recompute_fwd_factor
        self.started = False
        self.flops = self.macs = self.params = 0
        self.profiles: dict[nn.Module, ModuleProfile] = {}
        self._counter: ModuleCounter | None = None

    def start_profile(self, ignore_list: Iterable[type] | None = None) -> None:
        """Start to count; modules of the types in `ignore_list` are not listed separately."""
        self.stop_profile()
        self.profiles = profiles_of(self.model, ignore_list or ())
        device = torch.device("cuda" if get_accelerator().name() == "cuda" else "cpu")
        self._counter = ModuleCounter(self.profiles, clock_of(device))
        self._counter.start(counts=True)
        self.started = True

    def stop_profile(self) -> None:
        """Stop counting and keep the counts."""
        if self._counter is not None:
            self._counter.stop()
            get_accelerator().synchronize()
            self._counter.settle()
            fill_containers(self.model, self.profiles)
            self._counter = None
            total = self._total
            self.flops, self.macs, self.params = total.flops, total.macs, total.params

    def reset_profile(self) -> None:
        """Set all counts to zero."""
        for profile in self.profiles.values():
            profile.flops = profile.macs = 0
            profile.duration = 0.0

    def end_profile(self) -> None:
        """Stop counting and remove the counts."""
        self.stop_profile()
        self.profiles, self.started = {}, False

    def get_total_flops(self, as_string: bool = False) -> int | str:
        """Return the FLOPs of the forward pass."""
        flops = self._total.flops
        return number_to_string(flops) if as_string else flops

    def get_total_macs(self, as_string: bool = False) -> int | str:
        """Return the multiply-accumulate operations of the forward pass."""
        macs = self._total.macs
        return macs_to_string(macs) if as_string else macs

    def get_total_duration(self, as_string: bool = False) -> float | str:
        """Return the seconds of the forward pass."""
        self._settle()
        duration = self._total.duration
        return duration_to_string(duration) if as_string else duration

    def get_total_params(self, as_string: bool = False) -> int | str:
        """Return the number of parameters on this rank, whether ZeRO shards them or not."""
        params = self._total.params
        return params_to_string(params) if as_string else params

    def print_model_profile(
        self,
        profile_step: int = 1,
        module_depth: int = -1,
        top_modules: int = 1,
        detailed: bool = True,
        output_file: str | None = None,
    ) -> None:
        """Print a report.

        Args:
            profile_step: the profiled step, for the header.
            module_depth: the greatest depth of listed modules; -1 for no limit.
            top_modules: the number of module types to list at each depth.
            detailed: whether to list each module.
            output_file: the file to write to instead of standard output.
        """
        if not self.started:
            return
        self._settle()
        if output_file:
            Path(output_file).resolve().parent.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            if output_file:
                file = stack.enter_context(Path(output_file).open("w", encoding="utf-8"))
                stack.enter_context(redirect_stdout(file))
            print("\n".join(self._summary(profile_step)))
            self.print_model_aggregated_profile(module_depth, top_modules)
            if detailed:
                rows = rows_of(self.model, self.profiles)
                print("\n".join(module_tree(rows, self._total, module_depth)), flush=True)

    def print_model_aggregated_profile(self, module_depth: int = -1, top_modules: int = 1) -> None:
        """Print the module types with the most parameters, FLOPs and time at each depth."""
        print("\n".join(largest_types(rows_of(self.model, self.profiles), module_depth, top_modules)))

    @property
    def _total(self) -> ModuleProfile:
        return self.profiles.get(self.model, ModuleProfile())

    def _settle(self) -> None:
        """Synchronize the device, so that times are complete."""
        if self._counter is not None:
            get_accelerator().synchronize()
            self._counter.settle()

    def _summary(self, step: int) -> list[str]:
        total, engine = self._total, self.ds_engine
        rows: dict[str, object] = {}
        if engine is not None:
            rows |= {"world size": engine.world_size, "data parallel size": engine.dp_world_size}
            rows["batch size per GPU"] = engine.train_micro_batch_size_per_gpu()
        rows |= {
            "params per GPU": params_to_string(total.params),
            "fwd MACs per GPU": macs_to_string(total.macs),
            "fwd flops per GPU": number_to_string(total.flops),
            "fwd latency": duration_to_string(total.duration),
            "fwd FLOPS per GPU": flops_to_string(total.flops / max(total.duration, 1e-9)),
        }
        return [
            f"flops profile at step {step}",
            *(f"  {name + ':':<32}{value}" for name, value in rows.items()),
        ]


def get_model_profile(
    model: nn.Module,
    input_shape: tuple[int, ...] | None = None,
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] = MappingProxyType({}),
    print_profile: bool = True,
    detailed: bool = True,
    module_depth: int = -1,
    top_modules: int = 1,
    warm_up: int = 1,
    as_string: bool = True,
    output_file: str | None = None,
    ignore_modules: Iterable[type] | None = None,
    mode: Literal["forward", "generate"] = "forward",
) -> tuple[int | str, int | str, int | str]:
    """Return the FLOPs, multiply-accumulate operations and parameters of one forward pass.

    The model is left in eval mode.

    Args:
        model: the model.
        input_shape: the shape of the only input; None if `args` and `kwargs` are the inputs.
        args, kwargs: the inputs.
        print_profile: whether to print a report.
        detailed, module_depth, top_modules, output_file: see `print_model_profile`.
        warm_up: the number of runs before the profiled one.
        as_string: whether to return text with units.
        ignore_modules: types of modules that are not listed separately.
        mode: ``generate`` calls the model's method of that name.

    Raises:
        ConfigError: there is no input, or the mode is unknown.
    """
    if mode not in ("forward", "generate"):
        raise ConfigError(f"`mode` must be forward or generate, but is {mode}; choose one")
    if input_shape is not None:
        like = next(model.parameters(), torch.empty(0))
        args = [torch.zeros(input_shape, dtype=like.dtype, device=like.device)]
    if not args and not kwargs:
        raise ConfigError(
            "`input_shape` must be given where `args` and `kwargs` are not, but is None; give one"
        )
    profiler = FlopsProfiler(model)
    run = model.eval() if mode == "forward" else model.eval().generate
    for _ in range(warm_up):
        run(*args, **kwargs)  # type: ignore[operator]  # a module, or its method
    profiler.start_profile(ignore_modules)
    run(*args, **kwargs)  # type: ignore[operator]  # a module, or its method
    if print_profile:
        profiler.print_model_profile(warm_up, module_depth, top_modules, detailed, output_file)
    flops, macs = profiler.get_total_flops(as_string), profiler.get_total_macs(as_string)
    params = profiler.get_total_params(as_string)
    profiler.end_profile()
    return flops, macs, params
