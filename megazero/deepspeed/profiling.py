"""The FLOPs profiler: what the forward pass of each module computes, and how long it takes.

FLOPs come from torch's `FlopCounterMode`, which sees the operators that run: products of matrices,
convolutions and attention as two FLOPs per multiplication and addition, to which activations and norms are
added here. A backward pass is not counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.hooks import RemovableHandle

from megazero.deepspeed.accelerator.choose import get_accelerator
from megazero.errors import ConfigError

_UNITS = MappingProxyType({"T": 1e12, "G": 1e9, "M": 1e6, "K": 1e3, "": 1.0, "m": 1e-3, "u": 1e-6})
_ATEN = torch.ops.aten


def _per_element(flops: int) -> Callable[..., int]:
    def count(shape: Sequence[int], *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
        return flops * prod(shape)

    return count


_ELEMENTWISE: Mapping[Any, Callable[..., int]] = MappingProxyType(
    {
        **dict.fromkeys((_ATEN.relu, _ATEN.gelu, _ATEN.silu, _ATEN.elu, _ATEN.hardtanh), _per_element(1)),
        **dict.fromkeys((_ATEN.leaky_relu, _ATEN._softmax, _ATEN._log_softmax), _per_element(1)),
        **dict.fromkeys((_ATEN.native_layer_norm, _ATEN.native_group_norm), _per_element(5)),
        **dict.fromkeys((_ATEN.native_batch_norm,), _per_element(5)),
    }
)


@dataclass
class ModuleProfile:
    """A module's forward pass: its FLOPs, its multiply-accumulate operations, its parameters and seconds."""

    flops: int = 0
    macs: int = 0
    params: int = 0
    duration: float = 0.0


class FlopsProfiler:
    """Profiles the forward pass of a module, from `start_profile` to `end_profile`.

    Args:
        model: the module.
        ds_engine: the engine around it, which the printed report names.
        recompute_fwd_factor: the part of the forward pass that the backward pass computes again.
    """

    def __init__(self, model: nn.Module, ds_engine: Any = None, recompute_fwd_factor: float = 0.0):
        self.model, self.ds_engine, self.recompute_fwd_factor = model, ds_engine, recompute_fwd_factor
        self.started = False
        self.profiles: dict[nn.Module, ModuleProfile] = {}
        self._counter: FlopCounterMode | None = None
        self._handles: list[RemovableHandle] = []

    def start_profile(self, ignore_list: Iterable[type] | None = None) -> None:
        """Begin to count; modules of the types in `ignore_list` are not listed by themselves."""
        self.stop_profile()
        self.reset_profile()
        ignored = tuple(ignore_list or ())
        begun: list[tuple[int, int, float]] = []

        def before(module: nn.Module, args: Any) -> None:
            begun.append(self._now())

        def after(module: nn.Module, args: Any, output: Any) -> None:
            profile = self.profiles[module]
            flops, macs, clock = (end - start for start, end in zip(begun.pop(), self._now(), strict=True))
            profile.flops += int(flops)
            profile.macs += int(macs)
            profile.duration += clock

        for module in self.model.modules():
            if type(module) not in ignored:
                self._handles.append(module.register_forward_pre_hook(before))
                self._handles.append(module.register_forward_hook(after))
        self._counter = FlopCounterMode(display=False, custom_mapping=dict(_ELEMENTWISE))
        self._counter.__enter__()
        self.started = True

    def stop_profile(self) -> None:
        """Stop counting; the figures stay."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._counter is not None:
            self._counter.__exit__(None, None, None)
            self._counter = None

    def reset_profile(self) -> None:
        """Set all figures to zero."""
        sizes = {module: sum(map(_numel, module.parameters())) for module in self.model.modules()}
        self.profiles = {module: ModuleProfile(params=size) for module, size in sizes.items()}

    def end_profile(self) -> None:
        """Stop counting and forget the figures."""
        self.stop_profile()
        self.profiles, self.started = {}, False

    def get_total_flops(self, as_string: bool = False) -> int | str:
        """The FLOPs of the forward pass."""
        flops = self._total.flops
        return number_to_string(flops) if as_string else flops

    def get_total_macs(self, as_string: bool = False) -> int | str:
        """The multiply-accumulate operations of the forward pass."""
        macs = self._total.macs
        return macs_to_string(macs) if as_string else macs

    def get_total_duration(self, as_string: bool = False) -> float | str:
        """The seconds that the forward pass took."""
        duration = self._total.duration
        return duration_to_string(duration) if as_string else duration

    def get_total_params(self, as_string: bool = False) -> int | str:
        """The parameters on this rank, in whatever pieces ZeRO keeps them."""
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
        """Print the figures.

        Args:
            profile_step: the step that was profiled, for the heading.
            module_depth: the depth down to which modules are summed up; -1 is all the way.
            top_modules: how many types of modules are named at each depth.
            detailed: whether each module follows.
            output_file: the file to write instead.
        """
        if not self.started:
            return
        if output_file:
            Path(output_file).resolve().parent.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            if output_file:
                file = stack.enter_context(Path(output_file).open("w", encoding="utf-8"))
                stack.enter_context(redirect_stdout(file))
            print("\n".join(self._summary(profile_step)))
            self.print_model_aggregated_profile(module_depth, top_modules)
            if detailed:
                print("\n".join(self._details()), flush=True)

    def print_model_aggregated_profile(self, module_depth: int = -1, top_modules: int = 1) -> None:
        """Print the types of modules with the most parameters, work and time at each depth."""
        depths: dict[int, dict[str, ModuleProfile]] = {}
        for name, module in self.model.named_modules():
            kinds = depths.setdefault(name.count(".") + bool(name), {})
            total, own = kinds.setdefault(type(module).__name__, ModuleProfile()), self.profiles[module]
            total.params += own.params
            total.macs += own.macs
            total.duration += own.duration
        deepest = len(depths) - 1 if module_depth == -1 else module_depth
        print(f"the {top_modules} largest types of modules at each depth")
        for depth, kinds in sorted(depths.items())[: deepest + 1]:
            print(f"depth {depth}:")
            for field, show in _COLUMNS.items():
                largest = sorted(kinds.items(), key=lambda item: getattr(item[1], field), reverse=True)
                shown = {name: show(getattr(own, field)) for name, own in largest[:top_modules]}
                print(f"    {field:<12}{shown}")

    @property
    def _total(self) -> ModuleProfile:
        return self.profiles.get(self.model, ModuleProfile())

    def _now(self) -> tuple[int, int, float]:
        """FLOPs, multiply-accumulate operations and the time so far."""
        assert self._counter is not None, "hooks are removed when the counter is"
        counts = self._counter.get_flop_counts().get("Global", {})
        products = sum(flops for operator, flops in counts.items() if operator not in _ELEMENTWISE)
        get_accelerator().synchronize()
        return sum(counts.values()), products // 2, time.perf_counter()

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

    def _details(self) -> list[str]:
        total, lines = self._total, ["each module: parameters, MACs, time, FLOPS"]
        for name, module in self.model.named_modules():
            own = self.profiles[module]
            parts = []
            for field, show in _COLUMNS.items():
                part, whole = getattr(own, field), getattr(total, field)
                parts.append(f"{show(part)} = {100 * part / (whole or 1):.3g}%")
            rate = flops_to_string(own.flops / own.duration if own.duration else 0)
            place = "  " * (name.count(".") + bool(name))
            lines.append(f"{place}{name or 'model'} ({type(module).__name__}): {', '.join((*parts, rate))}")
        return lines


def get_model_profile(
    model: nn.Module,
    input_shape: tuple[int, ...] | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] = MappingProxyType({}),
    print_profile: bool = True,
    detailed: bool = True,
    module_depth: int = -1,
    top_modules: int = 1,
    warm_up: int = 1,
    as_string: bool = True,
    output_file: str | None = None,
    ignore_modules: Iterable[type] | None = None,
    mode: Literal["forward", "generate"] = "forward",
) -> tuple[Any, Any, Any]:
    """The FLOPs, multiply-accumulate operations and parameters of one forward pass.

    The model is left in eval mode.

    Args:
        model: the model.
        input_shape: the shape of its only input; else `args` and `kwargs` are its inputs.
        args, kwargs: its inputs.
        print_profile, detailed, module_depth, top_modules, output_file: see `print_model_profile`.
        warm_up: how often it runs before it is timed.
        as_string: whether figures have units.
        ignore_modules: types of modules that are not listed by themselves.
        mode: ``generate`` calls the model's method of that name.

    Raises:
        ConfigError: there is no input, or no such mode.
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
    figures = tuple(
        ask(as_string)
        for ask in (profiler.get_total_flops, profiler.get_total_macs, profiler.get_total_params)
    )
    profiler.end_profile()
    return figures  # type: ignore[return-value]  # three of them


def _numel(param: Tensor) -> int:
    return int(getattr(param, "ds_numel", param.numel()))


def number_to_string(num: float, units: str | None = None, precision: int = 2) -> str:
    """A number and its unit: ``1.5 K``."""
    if units is None:
        units = next((unit for unit, size in _UNITS.items() if num >= size), "u" if num else "")
    return f"{round(num / _UNITS.get(units, 1.0), precision):g} {units}"


def macs_to_string(macs: float, units: str | None = None, precision: int = 2) -> str:
    """Multiply-accumulate operations: ``1.5 KMACs``."""
    return f"{number_to_string(macs, units, precision)}MACs"


def flops_to_string(flops: float, units: str | None = None, precision: int = 2) -> str:
    """FLOPs a second: ``1.5 KFLOPS``."""
    return f"{number_to_string(flops, units, precision)}FLOPS"


def bytes_to_string(b: float, units: str | None = None, precision: int = 2) -> str:
    """Bytes: ``1.5 KB``."""
    return f"{number_to_string(b, units, precision)}B"


def params_to_string(params_num: float, units: str | None = None, precision: int = 2) -> str:
    """Parameters: ``1.5 B`` is 1.5e9."""
    units = "G" if units == "B" else units
    return number_to_string(params_num, units, precision).replace("G", "B").strip()


def duration_to_string(duration: float, units: str | None = None, precision: int = 2) -> str:
    """Seconds: ``1.5 ms``."""
    return f"{number_to_string(duration, units, precision)}s"


_COLUMNS: Mapping[str, Callable[[float], str]] = MappingProxyType(
    {"params": params_to_string, "macs": macs_to_string, "duration": duration_to_string}
)
