"""The time of a published row's step, from its sizes alone: the work of a layer on paper, priced.

The lists follow the code that ran, kernel by kernel: Megatron-LM's with unfused attention (2021, 2022), its
later one with fused attention, and FSDP. Nothing here is fitted to a row; the one number of a family of
software is in `families.json`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

import torch

from benchmarks.published.rows import Row
from megazero.account.profilers.calls import CollectiveCall
from megazero.plan.prices import Prices
from megazero.plan.work import Kernel

FAMILIES = Path(__file__).with_name("families") / "efficiency.json"
EXPOSED = 0.3
"""The share of tensor-parallel communication that is left when products and calls run in pieces."""
SLOWED = 0.25
"""What hidden communication costs of its own time: kernels share processors and memory with it (vTrain)."""
FLASH_2 = 0.62
"""What FlashAttention-2 reaches on Hopper of what kernels made for it do (Shah et al. 2024)."""
BLOCKING = 80e-6
"""What a kernel costs on top if the host waits for each one (BLOOM's sweep over micro-batches)."""


@lru_cache
def efficiencies() -> dict[str, float]:
    """Family of software -> the share of a device's rates that its kernels reach."""
    document: dict[str, float] = json.loads(FAMILIES.read_text(encoding="utf-8"))
    return document


@dataclass(frozen=True)
class Parts:
    """The seconds of a step, term by term."""

    pipeline: float
    bubble: float
    messages: float
    replicas: float
    update: float

    @property
    def total(self) -> float:
        """The step."""
        return self.pipeline + self.bubble + self.messages + self.replicas + self.update


class Step:
    """A row's step on paper.

    Args:
        row: it.
        efficiency: that of its family, if it is not the one in the file.
    """

    def __init__(self, row: Row, efficiency: float | None = None):
        self.row, self.layout, self.shape = row, row.layout, row.shape
        self.has = row.software.features.__contains__
        family = row.software.family
        self.prices = Prices(
            row.machine.load(),
            row.machine.gpus_per_node,
            efficiencies().get(family, 1.0) if efficiency is None else efficiency,
        )
        self.dtype = getattr(torch, row.software.precision)
        self.tokens = row.layout.micro_batch * row.sequence // row.layout.context
        self.split = row.layout.tensor if row.software.sequence_parallel else 1
        shape, tensor = row.shape, row.layout.tensor
        self.qkv = int(shape.hidden * (1 + 2 * shape.kv_share)) // tensor
        self.up = shape.ffn * (2 if shape.gated else 1) // tensor

    # Kernels.

    def move(self, name: str, elements: float, nbytes: float) -> Kernel:
        """A kernel that moves `nbytes` for each element; a compiler merges it with its neighbours."""
        merged = 0.6 if self.has("compiled") else 1.0
        return Kernel(name, int(elements * nbytes * merged))

    def product(self, m: int, n: int, k: int, batch: int = 1, more: float = 0) -> Kernel:
        """A matrix product; `more` are bytes on top of its operands'."""
        size = 1 if self.dtype is torch.float8_e4m3fn and batch == 1 else 2
        nbytes = batch * (size * (m * k + k * n) + 2 * m * n) + more
        dtype = self.dtype if batch == 1 else torch.bfloat16
        return Kernel("mm", int(nbytes), 2.0 * m * n * k * batch, dtype, (m, n, k), batch)

    def linear(self, n: int, k: int) -> list[Kernel]:
        """A linear layer forward; in fp8 its input is quantized."""
        return [*self.quantized(k), self.product(self.tokens, n, k)]

    def quantized(self, width: int) -> list[Kernel]:
        """The kernel that quantizes [tokens, width], with its transpose."""
        return [self.move("quantize", self.tokens * width, 4)] if self.dtype is torch.float8_e4m3fn else []

    def input_gradient(self, n: int, k: int) -> list[Kernel]:
        """The gradient of a linear layer's input."""
        return [*self.quantized(n), self.product(self.tokens, k, n)]

    def weight_gradient(self, n: int, k: int) -> list[Kernel]:
        """The gradient of a linear layer's weight, added to the sum over micro-batches."""
        wide = 4 if self.row.software.gradient_bytes == 4 or self.has("fused-accumulation") else 2
        if self.has("fused-accumulation"):
            return [self.product(n, k, self.tokens, more=(2 * wide - 2) * n * k)]
        return [self.product(n, k, self.tokens), Kernel("add", (2 + 2 * wide) * n * k)]

    def core_attention(self, backward: bool) -> list[Kernel]:
        """Attention between the projections."""
        shape, layout, s = self.shape, self.layout, self.row.sequence
        heads = max(1, layout.micro_batch * shape.heads // layout.tensor)
        width = shape.hidden // shape.heads
        if self.has("fused-attention"):
            flops = 2.0 * heads * s * s * width / layout.context * (2.5 if backward else 1)
            nbytes = 2 * self.tokens * (self.qkv + shape.hidden // layout.tensor) * (2 if backward else 1)
            flops /= FLASH_2 if self.has("flash-attention-2") else 1
            return [
                Kernel(f"attention_{'backward' if backward else 'forward'}", nbytes, flops, torch.bfloat16)
            ]
        scores, drops = heads * s * s, self.has("dropout")
        near, far = self.product(s, s, width, heads), self.product(s, width, s, heads)
        softmax = [self.move("softmax", scores, 6 if backward else 4)]
        dropout = [self.move("dropout", scores, 5)] if drops else []
        return [near, far, *softmax, *dropout, *([near, far] if backward else [])]

    def between_products(self, backward: bool) -> list[Kernel]:
        """What a layer does besides products and attention: norms, biases, dropout, activation."""
        shape, tensor = self.shape, self.layout.tensor
        wide, part = self.tokens * shape.hidden / self.split, self.tokens * shape.hidden / tensor
        drops = self.has("dropout")
        norms = [self.move("norm", wide, 8 if backward else 4)] * 2
        adds = [self.move("bias_dropout_add", wide, (5 if backward else 7) if drops else 6)] * 2
        act = self.tokens * shape.ffn / tensor
        per = (10 if backward else 6) if shape.gated else (6 if backward else 4)
        moved = [self.move("transpose", part, 4), self.move("qkv", self.tokens * self.qkv, 4)]
        return [*norms, *adds, *moved, self.move("activation", act, per)]

    # Seconds of a layer for one micro-batch.

    def seconds(self, kernels: Iterable[Kernel]) -> float:
        """The seconds of kernels, one after the other."""
        blocking = BLOCKING if self.has("launch-blocking") else 0.0
        return sum(self.prices.kernel(kernel) + blocking for kernel in kernels)

    def shared(self, operation: str, nbytes: float) -> float:
        """The seconds of a call between the tensor-parallel ranks."""
        return self.prices.call(
            CollectiveCall("tp", operation, int(nbytes), tuple(range(self.layout.tensor)))
        )

    @cached_property
    def boundary_bytes(self) -> int:
        """The bytes of a layer's input on all tensor-parallel ranks."""
        return 2 * self.tokens * self.shape.hidden

    @cached_property
    def joined(self) -> float:
        """The seconds in which a block's halves meet: an all-reduce, or a reduce-scatter and a gather."""
        if self.layout.tensor == 1:
            return 0.0
        names = ("reduce_scatter", "all_gather") if self.row.software.sequence_parallel else ("all_reduce",)
        return sum(self.shared(name, self.boundary_bytes) for name in names)

    @cached_property
    def forward(self) -> float:
        """A layer, forward."""
        shape, tensor = self.shape, self.layout.tensor
        products = [
            *self.linear(self.qkv, shape.hidden),
            *self.linear(shape.hidden, shape.hidden // tensor),
            *self.linear(self.up, shape.hidden),
            *self.linear(shape.hidden, shape.ffn // tensor),
        ]
        calls = 2 * self.joined * (EXPOSED if self.has("tp-overlap") else 1)
        return self.seconds([*products, *self.core_attention(False), *self.between_products(False)]) + calls

    @cached_property
    def recomputed(self) -> float:
        """What backward repeats of a layer's forward."""
        match self.row.software.recompute:
            case "full":
                return self.forward
            case "selective" if not self.has("fused-attention"):
                return self.seconds(self.core_attention(False))
            case "selective":  # every second product, as torchtitan saves them
                return 0.5 * self.forward
        return 0.0

    @cached_property
    def backward(self) -> float:
        """A layer, backward, without what it repeats."""
        shape, tensor = self.shape, self.layout.tensor
        sizes = [
            (self.qkv, shape.hidden),
            (shape.hidden, shape.hidden // tensor),
            (self.up, shape.hidden),
            (shape.hidden, shape.ffn // tensor),
        ]
        inputs = [kernel for size in sizes for kernel in self.input_gradient(*size)]
        weights = [kernel for size in sizes for kernel in self.weight_gradient(*size)]
        time = self.seconds([*inputs, *weights, *self.core_attention(True), *self.between_products(True)])
        return time + self.backward_calls(self.seconds(weights))

    def backward_calls(self, weights: float) -> float:
        """The exposed seconds of a layer's tensor-parallel calls backward, beside gradients of weights."""
        if self.layout.tensor == 1:
            return 0.0
        if self.has("tp-overlap"):
            return 2 * self.joined * EXPOSED
        if not self.has("async-tensor"):
            return 2 * self.joined
        if not self.row.software.sequence_parallel:
            return self.beside(2 * self.joined, weights)
        gather, scatter = (
            self.shared(name, self.boundary_bytes) for name in ("all_gather", "reduce_scatter")
        )
        return 2 * gather + self.beside(2 * gather + 2 * scatter, 2 * weights)

    def beside(self, hidden: float, work: float) -> float:
        """What a call costs that runs beside `work`: what is longer than it, and what it slows it."""
        return max(0.0, hidden - work) + SLOWED * min(hidden, work)

    # The ends of the model.

    @cached_property
    def head(self) -> float:
        """The head and the loss of a micro-batch, forward and backward."""
        shape, tensor = self.shape, self.layout.tensor
        part = -(-shape.vocabulary // tensor)
        products = [
            Kernel("mm", 0, 2.0 * self.tokens * part * shape.hidden, torch.bfloat16, sizes)
            for sizes in (
                (self.tokens, part, shape.hidden),
                (self.tokens, shape.hidden, part),
                (part, shape.hidden, self.tokens),
            )
        ]
        loss = self.move("loss", self.tokens * part, 24 if self.has("fused-attention") else 56)
        calls = self.shared("all_gather", self.boundary_bytes) * 2 if tensor > 1 else 0.0
        return self.seconds([*products, loss, *self.between_products(True)[:1]]) + calls

    @cached_property
    def embedding(self) -> float:
        """The embedding of a micro-batch, forward and backward."""
        calls = self.shared("all_reduce", self.boundary_bytes) if self.layout.tensor > 1 else 0.0
        return self.seconds([self.move("embedding", self.tokens * self.shape.hidden, 24)]) + calls

    # The step.

    @cached_property
    def blocks(self) -> list[int]:
        """The layers of each chunk; where they do not divide evenly, ends have fewer."""
        chunks = self.layout.pipeline * self.layout.virtual
        least, more = divmod(self.shape.layers, chunks)
        counts = [least + (more > 0)] * chunks
        order = [i // 2 if i % 2 == 0 else chunks - 1 - i // 2 for i in range(chunks)]
        for index in order[: sum(counts) - self.shape.layers]:
            counts[index] -= 1
        return counts

    @cached_property
    def stages(self) -> list[tuple[float, float]]:
        """Forward and backward seconds of a micro-batch on each stage."""
        stages, chunks = self.layout.pipeline, len(self.blocks)
        layer = (self.forward, self.backward + self.recomputed)
        if self.row.software.zero == 3:
            layer = self.sharded(layer)
        times = []
        for stage in range(stages):
            count = sum(self.blocks[stage::stages])
            first, last = (stage == 0) * self.embedding, (stage == stages - 1) * self.head
            times.append((count * layer[0] + (first + last) / 3, count * layer[1] + (first + last) * 2 / 3))
        assert chunks == stages * self.layout.virtual
        return times

    def sharded(self, layer: tuple[float, float]) -> tuple[float, float]:
        """A layer whose weights are gathered for forward and backward, and its gradients scattered."""
        weights = self.shape.block_parameters / self.layout.tensor
        ranks = self.replicas(0)
        gather = self.prices.call(CollectiveCall("dp", "all_gather", int(2 * weights), ranks))
        scatter = self.prices.call(
            CollectiveCall("dp", "reduce_scatter", int(self.row.software.gradient_bytes * weights), ranks)
        )
        forward, backward = layer
        return (
            forward + self.beside(gather, forward),
            backward + self.beside(gather + scatter, backward),
        )

    def replicas(self, stage: int) -> tuple[int, ...]:
        """The world ranks that hold the same weights as the first one of a stage."""
        layout = self.layout
        size = layout.data * layout.context
        return tuple(stage * size * layout.tensor + i * layout.tensor for i in range(size))

    @cached_property
    def parts(self) -> Parts:
        """The terms of the step.

        The slowest stage works on all micro-batches; the others' first one, and the last one's way back, are
        the bubble, which chunks shorten.
        """
        m, virtual = self.layout.microbatches, self.layout.virtual
        whole = [sum(stage) for stage in self.stages]
        slowest = max(whole)
        bubble = (sum(whole) - slowest) / virtual
        return Parts(m * slowest, bubble, self.messages, self.replica_calls, self.update)

    @cached_property
    def messages(self) -> float:
        """What stages wait for messages."""
        layout = self.layout
        if layout.pipeline == 1:
            return 0.0
        cut = layout.tensor if self.row.software.sequence_parallel or self.has("scatter-gather") else 1
        stride = layout.tensor * layout.data * layout.context
        one = self.prices.call(CollectiveCall("pp", "send", self.boundary_bytes // cut, (0, stride)))
        if self.has("scatter-gather") and layout.tensor > 1:
            one += self.shared("all_gather", self.boundary_bytes)
        filling = 2 * (layout.pipeline - 1) * one
        steady = 0.0 if self.has("pp-overlap") else 2 * layout.microbatches * layout.virtual * one
        return filling + steady

    @cached_property
    def held(self) -> float:
        """Parameters of the rank that holds most."""
        shape, layout = self.shape, self.layout
        layers = max(sum(self.blocks[stage :: layout.pipeline]) for stage in range(layout.pipeline))
        return (layers * shape.block_parameters + shape.vocabulary * shape.hidden) / layout.tensor

    @cached_property
    def replica_calls(self) -> float:
        """The wait for replicas' gradients and parameters, and that of two stages for a tied embedding."""
        software, layout = self.row.software, self.layout
        ranks = self.replicas(0)
        time = 0.0
        if software.zero < 3 and len(ranks) > 1:
            nbytes = int(software.gradient_bytes * self.held)
            gather = CollectiveCall("dp", "all_gather", int(2 * self.held), ranks)
            whole = not software.zero or self.has("whole-gradients")
            reduce = CollectiveCall("dp", "all_reduce" if whole else "reduce_scatter", nbytes, ranks)
            calls = [self.prices.call(reduce), self.prices.call(gather) if software.zero else 0.0]
            if self.has("dp-overlap"):
                # Chunks come one after another, each with as many micro-batches as there are stages.
                turns = min(layout.pipeline, layout.microbatches) if layout.virtual > 1 else 1
                forward, backward = self.stages[0]
                calls = [self.beside(calls[0], turns * backward), self.beside(calls[1], turns * forward)]
            time += sum(calls)
        if layout.pipeline > 1 and not self.shape.gated:
            table = software.gradient_bytes * self.shape.vocabulary * self.shape.hidden / layout.tensor
            ends = (0, (layout.pipeline - 1) * len(ranks) * layout.tensor)
            time += self.prices.call(CollectiveCall("embedding", "all_reduce", int(table), ends))
        return time

    @cached_property
    def update(self) -> float:
        """The optimizer's step and the norm of gradients: bytes, no FLOPs."""
        software = self.row.software
        shards = len(self.replicas(0)) if software.zero else 1
        held = self.held
        if software.zero == 3:
            held = self.shape.parameters / self.layout.tensor / shards
            return self.seconds([Kernel("adam", int(50 * held))])
        return self.seconds([Kernel("adam", int(42 * held / shards)), Kernel("zero_", int(8 * held))])

    @cached_property
    def resting_bytes(self) -> float:
        """The bytes of weights, gradients and the optimizer's state on the rank that holds most.

        Per parameter: 2 and a gradient, and 12 of fp32 copies, which ZeRO shards.
        """
        software, shards = self.row.software, len(self.replicas(0))
        optimizer, weights = (
            nbytes / (shards if software.zero >= stage else 1) for nbytes, stage in ((12, 1), (2, 3))
        )
        return self.held * (software.gradient_bytes + optimizer + weights)
