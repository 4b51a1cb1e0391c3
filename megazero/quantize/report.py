"""What a quantization changed: the errors of outputs, bytes, perplexity, and the weights that stayed."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass

_NONE = "-"


@dataclass(frozen=True)
class WeightReport:
    """One weight.

    Attributes:
        name: its name in transformers, or ours if it is part of several.
        method: how its codes were chosen.
        error: the error of its outputs relative to them, over the calibration samples; None without samples.
        nearest_error: the same after plain rounding.
        bytes_before, bytes_after: what it takes in the file, scales included.
    """

    name: str
    method: str
    error: float | None
    nearest_error: float | None
    bytes_before: int
    bytes_after: int


@dataclass(frozen=True)
class Report:
    """A quantized model.

    Attributes:
        scheme, method: of the recipe, in words.
        samples: calibration samples.
        weights: the weights that were quantized, in order.
        skipped: those that were not, by their names in transformers.
        bytes_before, bytes_after: of all weights.
        held_out: samples on which the perplexities were measured.
        loss_before, loss_after: mean loss of a token of these, in nats; None without samples.
    """

    scheme: str
    method: str
    samples: int
    weights: tuple[WeightReport, ...]
    skipped: tuple[str, ...]
    bytes_before: int
    bytes_after: int
    held_out: int = 0
    loss_before: float | None = None
    loss_after: float | None = None

    @property
    def perplexities(self) -> tuple[float, float] | None:
        """The perplexity before and after; None if it was not measured."""
        if self.loss_before is None or self.loss_after is None:
            return None
        return math.exp(self.loss_before), math.exp(self.loss_after)

    def as_json(self) -> str:
        """The report for programs."""
        both = self.perplexities
        facts = asdict(self) | {"perplexity_before": both and both[0], "perplexity_after": both and both[1]}
        return json.dumps(facts, indent=2) + "\n"

    def as_text(self) -> str:
        """The report for people."""
        width = max([len(row.name) for row in self.weights], default=0)
        lines = [f"{self.scheme} by {self.method}, {self.samples} calibration samples", ""]
        lines.append(f"{'weight':<{width}}  error of outputs  when rounded        bytes  method")
        lines += [
            f"{row.name:<{width}}  {_share(row.error):>16}  {_share(row.nearest_error):>12}  "
            f"{row.bytes_after:>11,}  {row.method}"
            for row in self.weights
        ]
        lines += ["", f"left as they are: {', '.join(self.skipped) or 'none'}"]
        lines.append(f"bytes: {self.bytes_before:,} before, {self.bytes_after:,} after")
        if (both := self.perplexities) is not None:
            before, after = both
            lines.append(
                f"perplexity on {self.held_out} held-out samples: {before:.4f} before, {after:.4f} after "
                f"({100 * (after / before - 1):+.2f}%)"
            )
        return "\n".join(lines) + "\n"


def _share(value: float | None) -> str:
    return _NONE if value is None else f"{100 * value:.3f}%"
