"""Layers launched as CUDA graphs: one call replays a layer's whole forward, another its backward.

A graph reads and writes the memory that it was captured with. So inputs, dropout's keys included, are copied
into the graph's buffers, and results are read from buffers that the next replay overwrites. Only one
micro-batch can therefore be in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd import Function

from megazero.layers.fp8 import products_in_8_bits
from megazero.layers.inputs import LayerInputs
from megazero.layers.sums import Sums
from megazero.layers.transformer import Forward, TransformerLayer, layers_of, use_forward
from megazero.ops.autograd import Context, Gradients, apply

Work = Callable[[], Sequence[Tensor | None]]

WARM_CALLS = 3
"""Calls of a layer before its capture: libraries and the allocator set themselves up in them."""


class Graphs(Protocol):
    """A recorder of work, such as `CudaGraphs`."""

    def capture(self, work: Work) -> tuple[Sequence[Tensor | None], Callable[[], None]]:
        """Run or record `work`; return its results, and a function that computes them again in place."""


class CudaGraphs(Graphs):
    """CUDA's graphs, with one pool of memory for all of them.

    Graphs are replayed in another order than they are captured in: all forwards, then all backwards. So
    tensors that a forward saves must never return to the pool, whereas its temporaries may.
    """

    def __init__(self) -> None:
        self._pool: Any = None

    def capture(self, work: Work) -> tuple[Sequence[Tensor | None], Callable[[], None]]:
        """Record the kernels that `work` launches; nothing has run before the first replay."""
        graph = torch.cuda.CUDAGraph()
        # A helper thread may allocate pinned memory or ask for an event meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            results = work()
        self._pool = graph.pool()
        return results, graph.replay


def graph_layers(blocks: Iterable[nn.Module], graphs: Graphs, warm_calls: int = WARM_CALLS) -> None:
    """Launch the training passes of the layers among `blocks` as graphs, after some calls of each.

    Passes without gradients, with a cache, for some rows only or with documents run without graphs.

    Args:
        blocks: the blocks of a chunk; embedding and head stay as they are.
        graphs: the recorder.
        warm_calls: the number of calls of a layer before its capture.
    """
    for layer in layers_of(blocks):
        for scaling, _ in products_in_8_bits(layer):
            scaling.keeps = False
        use_forward(layer, _GraphedForward(layer, graphs, warm_calls))


@dataclass(frozen=True)
class _Tensors:
    """The tensors of a layer's inputs, and the inputs without them."""

    rest: LayerInputs
    names: tuple[str, ...]
    values: tuple[Tensor, ...]

    @classmethod
    def of(cls, inputs: LayerInputs) -> _Tensors:
        tensors = {f"key {place}": key for place, key in (inputs.site_keys or {}).items()}
        rows = inputs.rows
        tensors |= {f"rotary {place}": table for place, table in enumerate(rows.rotary or ())}
        if isinstance(rows.positions, Tensor):
            tensors["positions"] = rows.positions
        rows = replace(rows, positions=range(rows.whole_length), rotary=None, keys=None)
        rest = replace(inputs, rows=rows, site_keys=None)
        return cls(rest, tuple(tensors), tuple(tensors.values()))

    def inputs(self, values: Sequence[Tensor]) -> LayerInputs:
        """The layer's inputs with `values` as their tensors."""
        tensors = dict(zip(self.names, values, strict=True))
        keys = {name.removeprefix("key "): x for name, x in tensors.items() if name.startswith("key ")}
        rotary = tuple(x for name, x in tensors.items() if name.startswith("rotary ")) or None
        positions = tensors.get("positions", self.rest.rows.positions)
        any_key = next(iter(keys.values()), None)
        rows = replace(self.rest.rows, positions=positions, rotary=rotary, keys=any_key)
        return replace(self.rest, rows=rows, site_keys=keys or None)


class _GraphedForward:
    """A layer's `forward` that captures graphs and replays them."""

    def __init__(self, layer: TransformerLayer, graphs: Graphs, warm_calls: int):
        self.layer = layer
        self.plain: Forward = layer.forward
        self.graphs = graphs
        self.left = warm_calls
        self.captured: dict[tuple[object, ...], _LayerGraph] = {}

    def __call__(self, x: Tensor, inputs: LayerInputs) -> tuple[Tensor, Sums]:
        special = inputs.wanted is not None or inputs.generating or inputs.rows.documents is not None
        if special or not torch.is_grad_enabled():
            return self.plain(x, inputs)
        if self.left:
            self.left -= 1
            return self.plain(x, inputs)
        tensors = _Tensors.of(inputs.at(self.layer.layer))
        params = [p for p in self.layer.parameters() if p.requires_grad]
        shapes = tuple((tuple(tensor.shape), tensor.dtype) for tensor in (x, *tensors.values))
        # A graph reads weights where they were when it was captured.
        key = (shapes, tensors.names, x.requires_grad, tuple(p.data_ptr() for p in params))
        if key not in self.captured:
            self.captured[key] = _LayerGraph(self.plain, x, tensors, params, self.graphs)
        return apply(_Replay, self.captured[key], tensors.values, x, *params), Sums()


class _LayerGraph:
    """The graphs of a layer's forward and backward for inputs of certain shapes."""

    def __init__(
        self, plain: Forward, x: Tensor, tensors: _Tensors, params: Sequence[nn.Parameter], graphs: Graphs
    ):
        self.x = x.detach().clone().requires_grad_(x.requires_grad)
        self.values = tuple(value.clone() for value in tensors.values)
        self.inputs = tensors.inputs(self.values)
        self.wanted = [*([self.x] if x.requires_grad else []), *params]
        self._plain = plain
        self._y: Tensor | None = None
        (y,), self._forward = graphs.capture(self._run_forward)
        assert y is not None, "a layer has a result"
        self.y, self.grad_y = y, torch.zeros_like(y)
        self.grads, self._backward = graphs.capture(self._run_backward)

    def _run_forward(self) -> tuple[Tensor]:
        with torch.enable_grad():
            self._y, sums = self._plain(self.x, self.inputs)
        assert sums == Sums(), "rules refuse layers that add to loss terms"
        return (self._y.detach(),)

    def _run_backward(self) -> Gradients:
        assert self._y is not None, "forward is captured first"
        # Kept: without the graph, what forward has saved would go back to the pool.
        return torch.autograd.grad(self._y, self.wanted, self.grad_y, allow_unused=True, retain_graph=True)

    def forward(self, values: Sequence[Tensor], x: Tensor) -> Tensor:
        """The layer's result for new inputs, in the graph's memory."""
        for buffer, value in zip((self.x, *self.values), (x, *values), strict=True):
            buffer.detach().copy_(value)
        self._forward()
        return self.y.detach()

    def backward(self, grad_y: Tensor) -> list[Tensor | None]:
        """The gradients of the input, if it needs one, and of the parameters, for the latest forward."""
        self.grad_y.copy_(grad_y)
        self._backward()
        return [None if grad is None else grad.detach() for grad in self.grads]


class _Replay(Function):
    @staticmethod
    def forward(
        ctx: Context[_LayerGraph], graph: _LayerGraph, values: tuple[Tensor, ...], x: Tensor, *params: Tensor
    ) -> Tensor:
        ctx.kept = graph
        return graph.forward(values, x)

    @staticmethod
    def backward(ctx: Context[_LayerGraph], grad: Tensor) -> Gradients:
        return None, None, *([] if ctx.needs_input_grad[2] else [None]), *ctx.kept.backward(grad)
