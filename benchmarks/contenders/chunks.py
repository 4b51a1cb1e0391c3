"""The GPT split into equal chunks for torch's pipelining, with plain layers or megazero's own.

Both start from megazero's initial weights, so that all pipelines print the same losses. A chunk takes tokens
[b, s] if it is the first, else hidden states, and returns logits if it is the last, else hidden states.
Hidden states are [b, s, h] in fp32 between plain chunks, as autocast leaves them, and [s, b, h] in the
training dtype between megazero's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.contenders import Shape
from benchmarks.contenders.ours import make_config, vocabulary_of
from benchmarks.contenders.plain import Layer
from megazero.config.tree.parallel import ParallelConfig
from megazero.config.tree.zero import ZeroConfig
from megazero.models.batch import Batch
from megazero.models.gpt import GPT
from megazero.mpu.context import ParallelContext, solo_context
from megazero.mpu.param_spec import spec_of
from megazero.train.parts.chunks import build_chunks


class Chunk(Protocol):
    """A module with what a pipeline must know about it.

    Attributes:
        first, last: whether it has the embedding, and the head.
        word: the vocabulary's weight, if the chunk is first or last.
    """

    first: bool
    last: bool
    word: nn.Parameter | None

    def hidden(self) -> Tensor:
        """An example of the hidden states between chunks."""

    def logits(self) -> Tensor:
        """An example of the last chunk's output."""

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Mean cross-entropy of a micro-batch, in nats; labels [b, s]."""

    def decays(self, parameter: nn.Parameter) -> bool:
        """Whether weight decay applies to it."""

    def defer(self) -> Callable[[], Callable[[], None]] | None:
        """Start to split backward. What is returned collects the weight gradients that the backward just done
        has left; what that returns computes them. None: the module has no such way, autograd must do it.
        """


class PlainChunk(nn.Module):
    """Layers of the plain GPT. `word` is the first chunk's weight if this rank holds both ends."""

    def __init__(self, shape: Shape, number: int, chunks: int, word: nn.Parameter | None = None):
        super().__init__()
        self.shape = shape
        self.first, self.last = number == 0, number == chunks - 1
        each = shape.layers // chunks
        self.numbers = range(number * each, (number + 1) * each)
        self.layers = nn.ModuleList(Layer(shape) for _ in self.numbers)
        self.word = word
        if word is None and (self.first or self.last):
            self.word = nn.Parameter(torch.empty(shape.vocab, shape.hidden))
        if self.first:
            self.position = nn.Parameter(torch.empty(shape.sequence, shape.hidden))
        if self.last:
            self.norm = nn.LayerNorm(shape.hidden)
        self._load(initial_weights(shape))

    @torch.no_grad()
    def _load(self, weights: dict[str, Tensor]) -> None:
        if self.word is not None:
            self.word.copy_(weights["embedding.word.weight"])
        if self.first:
            self.position.copy_(weights["embedding.position.weight"])
        for number, layer in zip(self.numbers, self.layers, strict=True):
            theirs = {
                "norm1": "input_norm",
                "qkv": "attention.qkv",
                "out": "attention.out",
                "norm2": "mlp_norm",
                "up": "mlp.up",
                "down": "mlp.down",
            }
            for mine, name in theirs.items():
                for kind in ("weight", "bias"):
                    value = weights[f"layers.{number}.{name}.{kind}"]
                    if mine == "qkv":  # [heads, 3, d, ...] there, [3, heads, d, ...] here
                        value = value.transpose(0, 1)
                    parameter = getattr(getattr(layer, mine), kind)
                    parameter.copy_(value.reshape(parameter.shape))

    def forward(self, x: Tensor) -> Tensor:
        low = self.shape.dtype != "fp32"
        with torch.autocast(self.shape.device, dtype=self.shape.torch_dtype, enabled=low):
            if self.first:
                x = F.embedding(x, self.word) + self.position
            for layer in self.layers:
                x = layer(x)
            return F.linear(self.norm(x), self.word) if self.last else x

    def hidden(self) -> Tensor:
        return torch.empty(self.shape.micro_batch, self.shape.sequence, self.shape.hidden)

    def logits(self) -> Tensor:
        size = self.shape.micro_batch, self.shape.sequence, self.shape.vocab
        return torch.empty(size, dtype=self.shape.torch_dtype)

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.float().view(-1, logits.shape[-1]), labels.view(-1))

    def decays(self, parameter: nn.Parameter) -> bool:
        return parameter.dim() > 1

    def defer(self) -> None:
        return None


class OurChunk(nn.Module):
    """A part of megazero's GPT."""

    def __init__(self, part: GPT, shape: Shape):
        super().__init__()
        self.part = part
        self.shape = shape
        self.first, self.last = part.embedding is not None, part.head is not None
        self.word = part.embedding.word if self.first else part.head.weight if self.last else None
        self.deferred: list | None = None
        # A chunk that starts from hidden states only uses their shape.
        self.register_buffer("tokens", torch.zeros(shape.micro_batch, shape.sequence, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        run = self.part if self.last else self.part.hidden
        if self.first:
            return run(Batch(x), deferred=self.deferred)
        return run(Batch(self.tokens), x, deferred=self.deferred)

    def hidden(self) -> Tensor:
        return self.part.input_boundary(Batch(self.tokens)).empty(torch.device("cpu"))

    def logits(self) -> Tensor:
        size = self.shape.sequence, self.shape.micro_batch, self.shape.vocab
        return torch.empty(size, dtype=self.shape.torch_dtype)

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return self.part.token_losses(logits, labels).loss.mean()

    def decays(self, parameter: nn.Parameter) -> bool:
        return spec_of(parameter).weight_decay

    def defer(self) -> Callable[[], Callable[[], None]]:
        self.deferred = deferred = []

        def collect() -> Callable[[], None]:
            left = deferred.copy()  # only the backward just done adds to it
            deferred.clear()

            def compute() -> None:
                while left:
                    left.pop(0)()

            return compute

        return collect


def plain_chunks(shape: Shape, context: ParallelContext, stage_of: tuple[int, ...]) -> dict[int, PlainChunk]:
    """This stage's chunks, by their numbers along the model."""
    chunks: dict[int, PlainChunk] = {}
    for number in (n for n, stage in enumerate(stage_of) if stage == context.pp.rank):
        word = chunks[0].word if number == len(stage_of) - 1 and 0 in chunks else None
        chunks[number] = PlainChunk(shape, number, len(stage_of), word)
    return chunks


def our_chunks(shape: Shape, context: ParallelContext, parallel: ParallelConfig) -> dict[int, OurChunk]:
    """The same with megazero's layers."""
    config = make_config(shape, context.world_size, parallel, ZeroConfig())
    parts = build_chunks(config, vocabulary_of(shape), context, context.device)
    return {number: OurChunk(part, shape) for number, part in parts.items()}


def initial_weights(shape: Shape) -> dict[str, Tensor]:
    """megazero's initial weights by global name, in fp32 (after rounding to the training dtype)."""
    config = make_config(shape, 1, ParallelConfig(), ZeroConfig())
    context = solo_context()
    (model,) = build_chunks(config, vocabulary_of(shape), context, context.device).values()
    return {spec_of(p).name: p.detach().float() for p in model.parameters()}
