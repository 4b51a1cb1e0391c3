"""`Quantization`: the codes that blocks of numbers become, and the bytes that they take."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

SMALLEST_SCALE = 2.0**-126
"""Scales are no smaller than the smallest normal fp32, so that a quotient by them is as exact as any."""


class CodeFormat(NamedTuple):
    """One kind of code: a number of the kernel's, the bits it takes, and the largest magnitude it holds."""

    number: int
    bits: int
    largest: float


CODE_FORMATS = MappingProxyType(
    {
        "int8": CodeFormat(0, 8, 127.0),
        "int4": CodeFormat(1, 4, 7.0),
        "fp8": CodeFormat(2, 8, 448.0),  # e4m3: 4 bits of exponent, 3 of significand, no infinity
    }
)


@dataclass(frozen=True)
class Quantization:
    """Symmetric quantization of blocks (ZeRO++, Wang et al. 2023, block-based; Dettmers et al. 2022).

    A block's scale is its largest magnitude divided by the largest code, and at least 2^-126. Codes are
    quotients by the scale, rounded. int4 codes take half a byte each.

    Attributes:
        kind: ``int8``, ``int4`` or ``fp8`` (e4m3).
        block: elements that share a scale, a multiple of 8; the last block of a row may be shorter.
    """

    kind: str
    block: int = 256

    def __post_init__(self) -> None:
        if self.kind not in CODE_FORMATS:
            known = ", ".join(CODE_FORMATS)
            raise ValueError(f"`kind` must be one of {known}, but is {self.kind!r}; choose one of them")
        if self.block < 1 or self.block % 8:
            raise ValueError(f"`block` must be a multiple of 8, but is {self.block}; choose one such as 256")

    @property
    def format(self) -> CodeFormat:
        """The kind of code."""
        return CODE_FORMATS[self.kind]

    def blocks(self, numel: int) -> int:
        """Number of blocks of a row of `numel` elements."""
        return -(-numel // self.block)

    def row_bytes(self, numel: int) -> int:
        """Bytes of a quantized row of `numel` elements: 4 (ceil(numel / block) + ceil(numel bits / 32)).

        First the fp32 scales, then the codes, filled up with zeros so that the next row is aligned.
        """
        return 4 * (self.blocks(numel) + -(-numel * self.format.bits // 32))

    def code_bytes(self, numel: int) -> int:
        """Bytes of the codes alone, without what fills them up."""
        return -(-numel * self.format.bits // 8)

    def step(self, magnitude: float, value: float = 0.0) -> float:
        """The largest distance between neighbouring codes, times the scale, at a value of a block.

        Rounding to nearest changes the value by at most half of it, stochastic rounding by less than all of
        it; to which fp32 arithmetic adds no more than 2^-22 of `magnitude`.

        Args:
            magnitude: the largest magnitude in the block.
            value: the value; only fp8's steps depend on it.
        """
        scale = max(magnitude / self.format.largest, SMALLEST_SCALE)
        return max(abs(value) / 8, scale * 2.0**-9) if self.kind == "fp8" else scale
