"""Reads weights of few bits from a folder as the floats that they are, or as codes and scales."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megazero.errors import CheckpointError
from megazero.formats.hf.folder import StoredTensor
from megazero.formats.hf.packed import Compression, QuantizedWeight, words_of


@dataclass(frozen=True)
class CodedTensor(StoredTensor):
    """A stored matrix of codes and scales, its `parts`, which reads as floats of the scales' dtype."""

    parts: tuple[StoredTensor, StoredTensor]
    bits: int

    @property
    def in_rows(self) -> CodedTensor:
        """The tensor itself, which is a matrix."""
        return self

    def cut(self, first: int, stop: int) -> CodedTensor:
        """Rows `first` to `stop`, as a tensor of their own."""
        codes, scales = (part.cut(first, stop) for part in self.parts)
        return replace(self, shape=(stop - first, self.shape[1]), parts=(codes, scales))

    def quantized(self, rows: slice) -> QuantizedWeight:
        """Read rows as codes and scales."""
        codes, scales = (part.rows(rows) for part in self.parts)
        if codes.dtype == torch.int8:
            return QuantizedWeight(codes, scales, self.bits)
        return QuantizedWeight.of_words(codes, scales, self.shape[1], self.bits)

    def rows(self, rows: slice) -> Tensor:
        """Read rows as floats."""
        return self.quantized(rows).dequantized()

    def read_rows(self, rows: slice, memory: Tensor) -> None:
        """Read rows into contiguous CPU memory of the tensor's dtype."""
        memory.copy_(self.rows(rows).view(memory.shape))


def decoded(compression: Compression, tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The tensors of a folder, where codes and scales are one tensor of floats.

    Raises:
        CheckpointError: codes lack scales, or have another shape.
    """
    present: dict[str, StoredTensor] = {}
    parts = (".weight_packed", ".weight_scale", ".weight_shape")
    for name, stored in tensors.items():
        module = name.removesuffix(parts[0]).removesuffix(".weight")
        scales = tensors.get(module + parts[1])
        if name.endswith(parts[0]) or stored.dtype == torch.int8:
            present[f"{module}.weight"] = _joined(
                compression.bits, name, stored, scales, tensors.get(module + parts[2])
            )
        elif not name.endswith(parts[1:]):
            present[name] = stored
    return present


def _joined(
    bits: int, name: str, codes: StoredTensor, scales: StoredTensor | None, shape: StoredTensor | None
) -> CodedTensor:
    columns = codes.shape[-1]
    if shape is not None and shape.dtype == torch.int64 and shape.shape == (2,):
        columns = int(shape.rows(slice(1, 2)))
    words = words_of(columns, bits) if codes.dtype == torch.int32 else columns
    if (
        scales is None
        or (len(codes.shape), len(scales.shape)) != (2, 2)
        or (codes.shape[0], codes.shape[1]) != (scales.shape[0], words)
        or columns % max(1, scales.shape[1])
    ):
        raise CheckpointError(
            f"`{name}` must have a scale for each group of its {columns} columns, but has shape "
            f"{list(codes.shape)} and scales {None if scales is None else list(scales.shape)}; write the "
            "folder again"
        )
    return CodedTensor(
        codes.file, name, scales.dtype, (codes.shape[0], columns), codes.start, (codes, scales), bits
    )
