"""The FLOPs of a step, counted in the five ways that published figures use, and rates that know theirs.

Multiply-adds of a token in a block of width h: 2h²(1 + kv/a) for queries, keys, values and output, 2hf for
the feed-forward layer (3hf if it is gated), 2sh for attention, and hU in the head. A multiply-add is two
FLOPs; backward is twice forward. Looking up embeddings counts nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megazero.errors import ConfigError

COUNTS = ("hardware-full", "hardware-selective", "model", "model-causal", "6-n")
"""A step with full recomputation (Narayanan et al. 2021, MT-NLG, BLOOM: an HFU, 4/3 of the model's); one
that recomputes attention; the model's own with all of attention (Korthikanti et al. 2022, PaLM, Megatron-LM
before core 0.12), or with the causal half (Megatron-LM since); and six for each parameter and token."""


@dataclass(frozen=True)
class Shape:
    """The sizes of a transformer that decide its FLOPs; `vocabulary` with its padding."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocabulary: int
    gated: bool = False

    @property
    def kv_share(self) -> float:
        """The width of keys as a share of that of queries."""
        return self.kv_heads / self.heads

    @property
    def block_parameters(self) -> float:
        """Weights of a block's matrices, which are the multiply-adds of a token in them."""
        attention = 2 * self.hidden**2 * (1 + self.kv_share)
        return attention + (3 if self.gated else 2) * self.hidden * self.ffn

    @property
    def parameters(self) -> float:
        """Weights of all matrices; the embedding counts once."""
        return self.layers * self.block_parameters + self.vocabulary * self.hidden


def step_flops(count: str, shape: Shape, lengths: Iterable[int]) -> float:
    """The FLOPs of a step over sequences of `lengths` tokens, each of which attends to itself alone.

    Raises:
        ConfigError: `count` is none of `COUNTS`.
    """
    tokens = squares = 0
    for length in lengths:
        tokens, squares = tokens + length, squares + length**2
    linear = shape.layers * shape.block_parameters * tokens
    attention = 2 * shape.layers * shape.hidden * squares
    head = shape.hidden * shape.vocabulary * tokens
    match count:
        case "hardware-full":
            return 8 * (linear + attention) + 6 * head
        case "hardware-selective":
            return 6 * (linear + attention + head) + 2 * attention
        case "model":
            return 6 * (linear + attention + head)
        case "model-causal":
            return 6 * (linear + attention / 2 + head)
        case "6-n":
            return 6 * shape.parameters * tokens
    raise ConfigError(f"The count of FLOPs must be one of {', '.join(COUNTS)}, but is {count}; choose one")


@dataclass(frozen=True)
class Rate:
    """FLOP/s of a device, by a count."""

    count: str
    flop_per_s: float

    def over(self, other: Rate) -> float:
        """This rate as a multiple of another.

        Raises:
            ConfigError: they are counted in two ways.
        """
        if self.count != other.count:
            raise ConfigError(
                f"Rates must be of one count to be compared, but are {self.count} and {other.count}; "
                "count both in one way"
            )
        return self.flop_per_s / other.flop_per_s
