"""Count the FLOPs and the time of modules' forward passes.

FLOPs are counted by torch's formulas from the operators that run: matrix products, convolutions and attention
take two FLOPs per multiply-add; activations and norms are added. Backward is not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, shape_wrapper
from torch.utils.hooks import RemovableHandle

from megazero.account.profilers.clock import Clock, ClockPoint

Shape = Sequence[int]
_ATEN = torch.ops.aten


def _per_element(flops: int) -> Callable[..., int]:
    def count(shape: Shape, *args: object, **kwargs: object) -> int:
        return flops * prod(shape)

    wrapped: Callable[..., int] = shape_wrapper(count)
    return wrapped


_ELEMENTWISE: Mapping[object, Callable[..., int]] = MappingProxyType(
    {
        **dict.fromkeys((_ATEN.relu, _ATEN.gelu, _ATEN.silu, _ATEN.elu, _ATEN.hardtanh), _per_element(1)),
        **dict.fromkeys((_ATEN.leaky_relu, _ATEN._softmax, _ATEN._log_softmax), _per_element(1)),
        **dict.fromkeys((_ATEN.native_layer_norm, _ATEN.native_group_norm), _per_element(5)),
        **dict.fromkeys((_ATEN.native_batch_norm,), _per_element(5)),
    }
)


def _attention(query: Shape, key: Shape, value: Shape, *args: object, **kwargs: object) -> int:
    return 2 * prod(query[:3]) * key[-2] * (query[3] + value[-1])


def _attention_backward(
    grad: Shape, query: Shape, key: Shape, value: Shape, *args: object, **kwargs: object
) -> int:
    return 2 * prod(query[:3]) * key[-2] * (3 * query[3] + 2 * value[-1])


def _by_vector(first: Shape, *args: object, **kwargs: object) -> int:
    return 2 * prod(first)


PRODUCTS: Mapping[object, Callable[..., int]] = MappingProxyType(
    {
        _ATEN._scaled_dot_product_flash_attention_for_cpu: _attention,
        _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
        _ATEN.dot: _by_vector,
        _ATEN.mv: _by_vector,
    }
)
"""Formulas that torch's registry lacks: attention on a CPU, and products with a vector."""

_OF_PRODUCTS: Mapping[object, Callable[..., int]] = MappingProxyType(
    {**{product: shape_wrapper(count) for product, count in PRODUCTS.items()}, **flop_registry}
)


class OperatorCounter(TorchDispatchMode):
    """A dispatch mode that counts the FLOPs of this thread's operators.

    Attributes:
        flops: all FLOPs so far.
        products: FLOPs of matrix products, convolutions and attention so far.
    """

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self)
        self.flops = self.products = 0

    def __enter__(self) -> OperatorCounter:
        TorchDispatchMode.__enter__(self)
        return self

    def __exit__(self, *error: object) -> None:
        TorchDispatchMode.__exit__(self, *error)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True would make torch import its compiler, which takes seconds and is not used

    def __torch_dispatch__(
        self,
        func: Any,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        kwargs, packet = kwargs or {}, func._overloadpacket
        formula = _ELEMENTWISE.get(packet)
        product = _OF_PRODUCTS.get(packet) if formula is None else None
        if formula is None and product is None and func is not torch.ops.prim.device.default:
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        result = func(*args, **kwargs)
        if formula is not None:
            self.flops += formula(*args, **kwargs, out_val=result)
        elif product is not None:
            count = product(*args, **kwargs, out_val=result)
            self.flops += count
            self.products += count
        return result


@dataclass
class ModuleProfile:
    """A module's parameters, and its forward passes: FLOPs, multiply-adds, seconds and number of calls."""

    flops: int = 0
    macs: int = 0
    params: int = 0
    duration: float = 0.0
    calls: int = 0


class ModuleCounter:
    """Adds up the forward passes of modules by hooks, without those that backward recomputes.

    Args:
        profiles: the profile of each module, to which its forward passes are added.
        clock: times the forward passes.
        seen: called after each forward with the module, its inputs and its output.
    """

    def __init__(
        self,
        profiles: Mapping[nn.Module, ModuleProfile],
        clock: Clock,
        seen: Callable[[nn.Module, Any, Any], None] = lambda module, args, output: None,
    ):
        self.profiles = profiles
        self.clock = clock
        self.operators: OperatorCounter | None = None
        self._seen = seen
        self._handles: list[RemovableHandle] = []
        self._begun: list[tuple[int, int, ClockPoint]] = []
        self._spans: list[tuple[nn.Module, ClockPoint, ClockPoint]] = []

    def start(self, *, counts: bool) -> None:
        """Add hooks; with `counts`, count FLOPs too, which slows down every operator."""
        self.operators = OperatorCounter() if counts else None
        for module in self.profiles:
            self._handles.append(module.register_forward_pre_hook(self._before))
            self._handles.append(module.register_forward_hook(self._after))
        if self.operators is not None:
            self.operators.__enter__()

    def stop(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._begun.clear()
        if self.operators is not None:
            self.operators.__exit__(None, None, None)
            self.operators = None

    def settle(self) -> None:
        """Add the times of forward passes to the profiles; the device must have reached their ends."""
        for module, begin, end in self._spans:
            self.profiles[module].duration += self.clock.seconds(begin, end)
        self._spans.clear()

    def _now(self) -> tuple[int, int, ClockPoint]:
        counted = (0, 0) if self.operators is None else (self.operators.flops, self.operators.products)
        return (*counted, self.clock.now())

    def _before(self, module: nn.Module, args: object) -> None:
        if not _in_backward():
            self._begun.append(self._now())

    def _after(self, module: nn.Module, args: object, output: object) -> None:
        if _in_backward():
            return
        flops, products, clock = self._begun.pop()
        now = self._now()
        profile = self.profiles[module]
        profile.calls += 1
        profile.flops += now[0] - flops
        profile.macs += (now[1] - products) // 2
        self._spans.append((module, clock, now[2]))
        self._seen(module, args, output)


def elements(param: Tensor) -> int:
    """The number of a parameter's elements, of the whole parameter if DeepSpeed's interface shards it."""
    return int(getattr(param, "ds_numel", param.numel()))


def profiles_of(
    model: nn.Module, ignored: Iterable[type] = (), numel: Callable[[nn.Parameter], int] = elements
) -> dict[nn.Module, ModuleProfile]:
    """Make a profile with the parameter count of each module of a model, except of the types `ignored`."""
    kinds = tuple(ignored)
    return {
        module: ModuleProfile(params=sum(map(numel, module.parameters())))
        for module in model.modules()
        if type(module) not in kinds
    }


def fill_containers(module: nn.Module, profiles: Mapping[nn.Module, ModuleProfile]) -> None:
    """Give modules that are never called, such as lists of layers, the sums of their children."""
    for child in module.children():
        fill_containers(child, profiles)
    own = profiles.get(module)
    if own is None or own.calls or not list(module.children()):
        return
    inner = [profiles[child] for child in module.children() if child in profiles]
    own.flops = sum(profile.flops for profile in inner)
    own.macs = sum(profile.macs for profile in inner)
    own.duration = sum(profile.duration for profile in inner)


def _in_backward() -> bool:
    return int(torch._C._current_graph_task_id()) != -1
