"""Weights of few bits, as compressed-tensors stores them: codes and scales.

A folder names its scheme in the field ``quantization_config`` of ``config.json``. Codes are symmetric: code c
of b bits with the scale s of its group is the number c s. ``pack-quantized`` stores codes plus 2^(b - 1) as a
row's stream of bits, lowest first, in words of 32; ``int-quantized`` stores bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

FIELD = "quantization_config"
PACKED, BYTES = "pack-quantized", "int-quantized"
WORD = 32
"""Bits of a word of packed codes."""

_BY_TOKEN = MappingProxyType(
    {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
)


@dataclass(frozen=True)
class QuantizedWeight:
    """A matrix of integer codes, with a scale for each group of neighbours in a row.

    A product may take the codes as they are; `dequantized` is for those that cannot.

    Attributes:
        codes: int8 [rows, n], from -2^(bits - 1) to 2^(bits - 1) - 1.
        scales: [rows, groups] in the dtype of the products; groups divides n.
        bits: bits of a code, 4 or 8.
        rounds_inputs: whether inputs are rounded to 8 bits too, where the weight is used.
    """

    codes: Tensor
    scales: Tensor
    bits: int
    rounds_inputs: bool = False

    @property
    def group(self) -> int:
        """The neighbours that share a scale."""
        return self.codes.shape[1] // self.scales.shape[1]

    def dequantized(self) -> Tensor:
        """The numbers [rows, n], in the dtype of the scales."""
        groups = self.codes.to(self.scales.dtype).view(*self.scales.shape, self.group)
        return groups.mul_(self.scales.unsqueeze(2)).flatten(1)

    def packed(self) -> Tensor:
        """The codes as words, int32 [rows, ceil(n bits / 32)]."""
        per_word = WORD // self.bits
        positive = self.codes.to(torch.int64) + (1 << self.bits - 1)
        words = torch.nn.functional.pad(positive, (0, -positive.shape[1] % per_word)).unflatten(
            1, (-1, per_word)
        )
        packed: Tensor = (words << _shifts(self.bits)).sum(2).to(torch.int32)
        return packed

    @classmethod
    def of_words(cls, words: Tensor, scales: Tensor, columns: int, bits: int) -> QuantizedWeight:
        """The weight with these packed codes [rows, words], of which each row has `columns`."""
        digits = words.to(torch.int64).unsqueeze(2) >> _shifts(bits) & ((1 << bits) - 1)
        codes = digits.flatten(1)[:, :columns] - (1 << bits - 1)
        return cls(codes.to(torch.int8), scales, bits)


def words_of(columns: int, bits: int) -> int:
    """The words that a row of `columns` codes takes."""
    return -(-columns * bits // WORD)


def _shifts(bits: int) -> Tensor:
    return torch.arange(0, WORD, bits, dtype=torch.int64)


@dataclass(frozen=True)
class Compression:
    """The scheme of a folder's weights.

    Attributes:
        bits: bits of a code.
        format: `PACKED` or `BYTES`.
        rounds_inputs: whether inputs of products are rounded to 8 bits, token by token.
    """

    bits: int
    format: str
    rounds_inputs: bool = False

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Compression | None:
        """Read the scheme that ``config.json`` names; None if it names none.

        Raises:
            ValueError: the scheme is another one, in words.
        """
        section = config.get(FIELD)
        if section is None:
            return None
        groups = section.get("config_groups") if isinstance(section, dict) else None
        if not isinstance(groups, dict) or section.get("quant_method") != "compressed-tensors":
            raise ValueError(
                f"`{FIELD}` must be of compressed-tensors to be read here, but is {section!r:.100}; load the "
                "model with transformers, dequantize it and save it again"
            )
        weights = [group.get("weights") if isinstance(group, dict) else None for group in groups.values()]
        read = [part if isinstance(part, dict) else {} for part in weights]
        schemes = {(part.get("num_bits"), part.get("type"), part.get("symmetric")) for part in read}
        form = section.get("format")
        if schemes not in ({(4, "int", True)}, {(8, "int", True)}) or form not in (PACKED, BYTES):
            raise ValueError(
                f"`{FIELD}` must have symmetric integers of 4 or 8 bits in all groups, {PACKED} or {BYTES}, "
                f"but has {form!r:.40} and {weights!r:.200}; dequantize the model with transformers"
            )
        inputs = [group.get("input_activations") or {} for group in groups.values()]
        return cls(int(read[0]["num_bits"]), form, all(_BY_TOKEN.items() <= part.items() for part in inputs))
