"""Reports of what a quantization changed: errors of outputs, bytes, perplexity, and what stayed."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from megazero.errors import NumericsError
from megazero.formats.hf.packed import QuantizedWeight
from megazero.quantize.recipe import Recipe
from megazero.quantize.rtn import nearest, squared_error


@dataclass(frozen=True)
class WeightReport:
    """One weight.

    Attributes:
        name: our name of it.
        method: how its codes were chosen.
        error: the error of its outputs relative to them, over the calibration samples; None without samples.
        rounded_error: the same after plain rounding.
        bytes_before, bytes_after: what it takes in the file, scales included.
    """

    name: str
    method: str
    error: float | None
    rounded_error: float | None
    bytes_before: int
    bytes_after: int

    @property
    def short(self) -> str:
        """Its name within the layer, and the error."""
        name = self.name.split(".", 2)[2].removesuffix(".weight")
        return f"{name} {self.method if self.error is None else _percent(self.error)}"


class Tally:
    """Quantizes the matrices of a weight, and adds up what its report says."""

    def __init__(self, recipe: Recipe, name: str):
        self.recipe, self.name = recipe, name
        self._parts: list[QuantizedWeight] = []
        self._methods: Counter[str] = Counter()
        self._squares = [0.0, 0.0, 0.0]  # of errors, of those of plain rounding, and of the outputs

    def add(self, weight: Tensor, given: tuple[Tensor, int] | None, scale: Tensor | None) -> None:
        """Quantize a matrix, float64 [rows, n].

        Args:
            weight: the matrix.
            given: the products of its inputs, float64 [n, n], and their number; None without samples.
            scale: the scale [n] by which its inputs are divided; None for 1.
        """
        gram, tokens = (None, 0) if given is None else given
        if not torch.isfinite(weight).all():
            raise NumericsError(f"`{self.name}` must be finite, but is not; the model is damaged")
        scaled, its = weight, gram
        if scale is not None and gram is not None:
            scaled, its = weight * scale, gram / torch.outer(scale, scale)
        part, method = self.recipe.quantized(self.name, scaled, its, tokens)
        self._parts.append(part)
        self._methods[method + ", unscaled" * (self.recipe.folds and scale is None)] += 1
        if gram is not None and its is not None:
            rounded = nearest(weight, self.recipe.grid).dequantized().double()
            self._squares[0] += squared_error(part.dequantized().double() - scaled, its)
            self._squares[1] += squared_error(rounded - weight, gram)
            self._squares[2] += squared_error(weight, gram)

    def joined(self) -> QuantizedWeight:
        """The codes of all matrices as one matrix."""
        codes, scales = torch.cat([p.codes for p in self._parts]), torch.cat([p.scales for p in self._parts])
        return QuantizedWeight(codes, scales, self.recipe.grid.bits)

    def report(self) -> WeightReport:
        """The report of the weight."""
        weight, size = self.joined(), self.recipe.grid.dtype.itemsize
        *wrong, whole = self._squares
        error, rounded = (math.sqrt(square / whole) if whole else None for square in wrong)
        counted = [f"{count} " * (len(self._methods) > 1) + method for method, count in self._methods.items()]
        after = weight.codes.numel() * weight.bits // 8 + weight.scales.numel() * size
        return WeightReport(self.name, "; ".join(counted), error, rounded, weight.codes.numel() * size, after)


@dataclass(frozen=True)
class Report:
    """A quantized model.

    Attributes:
        recipe: scheme and method, in words.
        samples: calibration samples.
        weights: the weights that were quantized, in order.
        skipped: those that were not, by their modules in transformers.
        sizes: bytes of all weights, before and after.
        held_out: samples on which the losses were measured.
        losses: mean loss of a token of these in nats, before and after; None without samples.
    """

    recipe: str
    samples: int
    weights: tuple[WeightReport, ...]
    skipped: tuple[str, ...]
    sizes: tuple[int, int]
    held_out: int = 0
    losses: tuple[float, float] | None = None

    @property
    def perplexities(self) -> tuple[float, float] | None:
        """The perplexity before and after; None if it was not measured."""
        return None if self.losses is None else (math.exp(self.losses[0]), math.exp(self.losses[1]))

    def as_json(self) -> str:
        """The report for programs."""
        return json.dumps({**asdict(self), "perplexities": self.perplexities}, indent=2) + "\n"

    def as_text(self) -> str:
        """The report for people."""
        width = max(len(row.name) for row in self.weights)
        lines = [f"{self.recipe}, {self.samples} calibration samples", ""]
        lines.append(f"{'weight':<{width}}  error of outputs  when rounded        bytes  method")
        lines += [
            f"{row.name:<{width}}  {_percent(row.error):>16}  {_percent(row.rounded_error):>12}  "
            f"{row.bytes_after:>11,}  {row.method}"
            for row in self.weights
        ]
        lines += ["", f"left as they are: {', '.join(self.skipped)}"]
        lines.append(f"bytes: {self.sizes[0]:,} before, {self.sizes[1]:,} after")
        if (both := self.perplexities) is not None:
            change = 100 * (both[1] / both[0] - 1)
            lines.append(
                f"perplexity on {self.held_out} held-out samples: {both[0]:.4f} before, {both[1]:.4f} after "
                f"({change:+.2f}%)"
            )
        return "\n".join(lines) + "\n"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.3f}%"
