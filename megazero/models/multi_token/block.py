"""The block that predicts one further token (multi-token prediction, DeepSeek-V3, 2024, arXiv:2412.19437).

It joins a position's hidden states from the previous block with the embedding of the token that the previous
block predicts, and predicts the token after it. Weights and order are those of Megatron-LM and transformers.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from megazero.layers.embedding import vocabulary_spec, words_of
from megazero.layers.inputs import NOTHING_SKIPPED, LayerInputs
from megazero.layers.linear import ReplicatedLinear
from megazero.layers.norm import Norm
from megazero.layers.recompute import InputKeeping, recompute_units, run_layers
from megazero.layers.sums import Sums
from megazero.loss import LossTerm
from megazero.models.chunk import Slice
from megazero.models.layer import layer_of
from megazero.mpu.rng import site_key
from megazero.ops.dropout import dropout_mask_hidden
from megazero.spec.model import ModelSpec


class FurtherToken(nn.Module):
    """(hidden [s, b, h], tokens [b, s], inputs) -> (hidden [s, b, h], sums); s/tp under sequence parallelism.

    Both hidden states are normed, as the model's head reads them.

    Args:
        depth: number of tokens beyond the next one, from 1.
        word: the embedding's weight, or this stage's copy of it.
    """

    def __init__(self, depth: int, held: Slice, word: nn.Parameter):
        super().__init__()
        spec, placement, number = held.spec, held.placement, len(held.spec.layers) + depth - 1
        self.spec, self.placement, self.vocab_size = spec, placement, held.vocab[0]
        self.depth, self.word, self.site = depth, word, site_key("hidden", "embedding", depth)
        name, width = f"layers.{number}", spec.stream.width
        self.word_norm = Norm(f"{name}.word_norm", spec.norm, placement)
        self.hidden_norm = Norm(f"{name}.hidden_norm", spec.norm, placement)
        std = spec.stream.std
        self.join = ReplicatedLinear(f"{name}.join", 2 * width, width, placement, std, between=True)
        self.layer = layer_of(number, held)
        self.norm = Norm(f"{name}.final_norm", spec.norm, placement)
        self.units = recompute_units(1, held.recompute)
        self.keeping = InputKeeping.of(held.recompute, placement)

    def forward(self, hidden: Tensor, tokens: Tensor, inputs: LayerInputs) -> tuple[Tensor, Sums]:
        dtype = self.placement.dtype
        inputs = replace(inputs, skipping=NOTHING_SKIPPED)
        words = words_of(tokens.t(), self.word, self.vocab_size, self.placement)
        if self.spec.embedding.factor != 1.0:
            words = words * self.spec.embedding.factor
        drop = inputs.dropout(self.spec.stream.dropout, self.site)
        if drop is not None:
            words = words * dropout_mask_hidden(drop, *words.shape) / (1.0 - drop.p)
        both = torch.cat((self.word_norm(words), self.hidden_norm(hidden)), -1)
        x = self.join(both.to(dtype), inputs.deferred)
        if self.spec.stream.fp32:
            x = x.float()
        x, sums = run_layers([self.layer], x, inputs, self.units, self.keeping)
        return self.norm(x).to(dtype), sums


def further_tokens(held: Slice, word: nn.Parameter | None) -> nn.ModuleList:
    """Build the blocks of all further tokens.

    Args:
        word: the embedding's weight; None makes a copy, because the weight is on another stage.
    """
    depths = len(held.spec.further)
    if depths and word is None:
        spec = vocabulary_spec("further.word.weight", held.vocab, held.spec.stream)
        word = held.placement.parameter(replace(spec, tied_with="embedding.word.weight", shared=True))
    return nn.ModuleList(FurtherToken(d, held, word) for d in range(1, depths + 1) if word is not None)


def term_of(depth: int) -> str:
    """The name of a further token's loss term, as in Megatron-LM."""
    return f"mtp_{depth}"


def further_terms(spec: ModelSpec) -> tuple[LossTerm, ...]:
    """The loss terms of all further tokens; their coefficients sum to `further_weight`."""
    depths = len(spec.further)
    return tuple(LossTerm(term_of(depth), spec.further_weight / depths) for depth in range(1, depths + 1))
