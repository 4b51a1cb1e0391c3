"""Reads weights of few bits from a folder as the floats that they are, or as codes and scales."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megazero.checkpoint.box import Box
from megazero.checkpoint.naming import TensorLink, cut
from megazero.errors import CheckpointError
from megazero.formats.hf.folder import StoredTensor
from megazero.formats.hf.packed import Compression, QuantizedWeight, words_of
from megazero.ops.coded_linear import MOST_INPUTS


@dataclass(frozen=True)
class CodedTensor(StoredTensor):
    """A stored matrix of codes and scales, its `parts`, which reads as floats of the scales' dtype."""

    parts: tuple[StoredTensor, StoredTensor]
    compression: Compression

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
        bits = self.compression.bits
        if codes.dtype == torch.int32:
            return QuantizedWeight.of_words(codes, scales, self.shape[1], bits)
        return QuantizedWeight(codes, scales, bits)

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
                compression, name, stored, scales, tensors.get(module + parts[2])
            )
        elif not name.endswith(parts[1:]):
            present[name] = stored
    return present


def _joined(
    compression: Compression,
    name: str,
    codes: StoredTensor,
    scales: StoredTensor | None,
    shape: StoredTensor | None,
) -> CodedTensor:
    bits = compression.bits
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
        codes.file, name, scales.dtype, (codes.shape[0], columns), codes.start, (codes, scales), compression
    )


def read_codes(
    links: Sequence[tuple[TensorLink, StoredTensor]], box: Box, chunk: int
) -> QuantizedWeight | None:
    """The codes of a box [..., n] of one of our tensors, as a matrix, from the tensors of theirs that it is.

    A box that cuts groups has smaller ones.

    Args:
        links: all tensors of theirs, with their links to ours.
        box: the part of ours.
        chunk: elements that are read at a time.

    Returns:
        None if a tensor has no codes, or other ones than the rest, if its inputs are not the last dim of
        ours, or if `CodedWeight` has no place for them: groups of no multiple of 4, too many rounded inputs.
    """
    parts = [(link.in_rows, stored) for link, stored in links if isinstance(stored, CodedTensor)]
    columns, last = box.shape[-1], len(box.shape) - 1
    kinds = {(stored.compression, stored.parts[1].shape[1], stored.dtype) for _, stored in parts}
    if len(kinds) != 1 or len(parts) < len(links):
        return None
    ((compression, groups, dtype),) = kinds
    if any(link.merged[1] != (last,) or link.box.shape[last] != link.shape[last] for link, _ in parts):
        return None
    group = parts[0][0].shape[-1] // groups
    common = math.gcd(group, box.offset[-1], columns)
    if common < columns and common % 4:
        return None
    if compression.rounds_inputs and (common < columns or compression.bits != 8 or columns > MOST_INPUTS):
        return None
    codes = torch.empty(box.shape, dtype=torch.int8)
    scales = torch.empty((*box.shape[:-1], columns // common), dtype=dtype)
    of_group = (box.offset[-1] + torch.arange(0, columns, common)) // group
    for link, stored in parts:
        overlap = link.box.overlap(box)
        for piece in () if overlap is None else cut(overlap, link.merged[0], chunk):
            rows, covered = link.rows_of(piece)
            read, place = stored.quantized(rows), piece.within(box)
            codes[place] = link.as_ours(read.codes, covered)[piece.within(covered)]
            own = Box((*covered.offset[:-1], 0), (*covered.shape[:-1], groups))
            inside = (*piece.within(covered)[:-1], slice(None))
            scales[(*place[:-1], slice(None))] = link.as_ours(read.scales, own)[inside][..., of_group]
    return QuantizedWeight(
        codes.flatten(0, -2), scales.flatten(0, -2), compression.bits, compression.rounds_inputs
    )
