"""Small models for the tests of ZeRO. `Zoo` holds every kind of parameter that has ever been trouble."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megazero.config.tree.model import ModelConfig
from megazero.config.tree.recompute import RecomputeConfig
from megazero.layers.initialize import initialize
from megazero.layers.placement import Placement
from megazero.models.batch import Batch
from megazero.models.chunk import Slice
from megazero.models.gpt import GPT
from megazero.models.targets import Targets
from megazero.mpu.context import solo_context
from megazero.spec.resolve import model_spec
from megazero.zero.unit import Unit

WIDTH = 4


class WithBias(nn.Module):
    """A product, and its own bias for the caller to add: as row-parallel layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH, WIDTH))
        self.bias = nn.Parameter(torch.empty(WIDTH))

    def forward(self, x: Tensor) -> dict:
        return {"product": F.linear(x, self.weight), "rest": (self.bias.view(-1), None)}


class Head(nn.Module):
    """Logits from the embedding's weight (tied)."""

    def __init__(self, weight: nn.Parameter):
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.t()


class Zoo(nn.Module):
    """Tied, reused, unused, frozen, empty and tiny parameters; some of its own beside those of its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, WIDTH)
        self.reused = nn.Linear(WIDTH, WIDTH)
        self.pair = WithBias()
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = Head(self.embedding.weight)
        self.tiny = nn.Parameter(torch.ones(1))
        self.empty = nn.Parameter(torch.ones(0, WIDTH))
        self.unused = nn.Parameter(torch.ones(3))
        self.scalar = nn.Parameter(torch.ones(()))
        _fill(self, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = self.reused(x)
        x.mul_(self.tiny)
        x = torch.tanh(self.reused(x)) + self.empty.sum()
        both = self.pair(x)
        x = self.frozen(both["product"] + both["rest"][0])
        return self.head(self.norm(x)) * self.scalar


def zoo_loss(model: Zoo, step: int, sample: int) -> Tensor:
    """Cross-entropy of one sample."""
    tokens = _tokens(step, sample, 7, 6)
    return F.cross_entropy(model(tokens[:-1]), tokens[1:], reduction="sum")


class Sometimes(nn.Module):
    """Two layers, of which the second runs for the samples 0 and 1 alone, so on some ranks only."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Parameter(torch.empty(5))
        self.sometimes = nn.Parameter(torch.empty(5))
        self.later = nn.Parameter(torch.empty(5))
        _fill(self, 2)

    def forward(self, sample: int) -> Tensor:
        x = self.always * (sample + 1.0)
        if sample < 2:
            x = x * self.sometimes
        return (x * self.later).sum()


def sometimes_loss(model: Sometimes, step: int, sample: int) -> Tensor:
    """Of one sample; the same in every step."""
    return model(sample)


def make_gpt(recompute: str = "none") -> GPT:
    """Two layers of width 16, in one process."""
    config = ModelConfig(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=2,
        seq_length=8,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        init_method_std=0.1,
    )
    placement = Placement.of(solo_context(), torch.float32)
    model = GPT(Slice(model_spec(config), (13, 16), placement, RecomputeConfig(granularity=recompute)))
    initialize(model, 5, placement.place)
    return model


def gpt_loss(model: GPT, step: int, sample: int) -> Tensor:
    """Cross-entropy of one sample."""
    tokens = _tokens(step, sample, 13, 9).unsqueeze(0)
    return model.run(Batch(tokens[:, :-1], Targets(tokens[:, 1:].contiguous()))).terms["lm"]


def layer_units(model: GPT) -> list[Unit]:
    """The embedding, each layer, the head."""
    parts = [model.embedding, *model.layers, model.head]
    return [Unit(0, part, tuple(part.parameters())) for part in parts]


@torch.no_grad()
def _fill(model: nn.Module, seed: int) -> None:
    """Values that threads do not draw from each other's generator."""
    generator = torch.Generator().manual_seed(seed)
    for param in model.parameters():
        param.copy_(torch.randn(param.shape, generator=generator) * 0.7)


def _tokens(step: int, sample: int, vocabulary: int, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + sample)
    return torch.randint(0, vocabulary, (length,), generator=generator)
