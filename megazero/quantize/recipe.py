"""`Recipe`: what becomes of the weights, and by which method."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megazero.errors import ConfigError
from megazero.formats.hf.packed import QuantizedWeight
from megazero.quantize.calibrate import Moments
from megazero.quantize.gptq import Gptq
from megazero.quantize.grid import Grid
from megazero.quantize.rtn import clipped, nearest
from megazero.quantize.scaling import activity_scale, smooth_scale

SCHEMES = ("W8", "W4", "W8A8")
METHODS = ("rtn", "gptq", "awq", "smoothquant")
_GROUP = 128  # the group of W4 if none is given
_WHOLE = "re:"


@dataclass(frozen=True)
class Recipe:
    """The scheme and the method.

    Attributes:
        grid: the codes of weights.
        rounds_inputs: whether inputs are rounded to 8 bits too, for each token, where the model is used.
        method: one of `METHODS`.
        gptq: settings of GPTQ.
        strength: the part of the inputs' range that SmoothQuant moves into weights.
        ignore: names of modules of transformers that stay as they are: whole, the last parts of a name, or
            ``re:`` and a regular expression.
    """

    grid: Grid
    rounds_inputs: bool = False
    method: str = "rtn"
    gptq: Gptq = field(default_factory=Gptq)
    strength: float = 0.5
    ignore: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        scheme: str,
        method: str,
        group: int | None = None,
        dtype: torch.dtype = torch.float32,
        *,
        gptq: Gptq | None = None,
        strength: float = 0.5,
        ignore: Sequence[str] = (),
    ) -> Recipe:
        """Make the recipe of a scheme, one of `SCHEMES`.

        Args:
            group: inputs that share a scale; 0 for all of a row, None for 128 with 4 bits and all with 8.

        Raises:
            ConfigError: the settings do not go together.
        """
        size = (_GROUP if scheme == "W4" else 0) if group is None else group
        if scheme == "W8A8" and size:
            raise ConfigError(
                f"`--group-size` must be 0 with W8A8, whose products take a scale for each row, but is {size}"
            )
        if size < 0 or size == 1:
            raise ConfigError(f"`--group-size` must be 0 or at least 2, but is {size}")
        if method == "smoothquant" and scheme != "W8A8":
            raise ConfigError(
                f"`--method` must be rtn, gptq or awq with {scheme}, but is smoothquant, which makes inputs "
                "easier to round; only W8A8 rounds inputs"
            )
        if gptq is not None and not 0 < gptq.damping <= 1:
            raise ConfigError(f"`--damping` must be above 0 and at most 1, but is {gptq.damping}")
        if not 0 <= strength <= 1:
            raise ConfigError(f"`--smoothing-strength` must be from 0 to 1, but is {strength}")
        for pattern in ignore:
            try:
                re.compile(pattern.removeprefix(_WHOLE) if pattern.startswith(_WHOLE) else "")
            except re.error as error:
                raise ConfigError(
                    f"`--ignore` must be a regular expression, but {pattern} is not: {error}"
                ) from None
        grid = Grid(4 if scheme == "W4" else 8, size or None, dtype)
        return cls(grid, scheme == "W8A8", method, gptq or Gptq(), strength, tuple(ignore))

    def ignores(self, module: str) -> bool:
        """Whether a module of transformers stays as it is."""
        return any(
            re.match(pattern.removeprefix(_WHOLE), module) is not None
            if pattern.startswith(_WHOLE)
            else f".{module}".endswith(f".{pattern}")
            for pattern in self.ignore
        )

    def __str__(self) -> str:
        scheme = f"W{self.grid.bits}" + "A8" * self.rounds_inputs
        return f"{scheme}{f' in groups of {self.grid.group}' if self.grid.group else ''} by {self.method}"

    @property
    def folds(self) -> bool:
        """Whether the method scales inputs."""
        return self.method in ("awq", "smoothquant")

    def scale(self, weight: Tensor, moments: Moments) -> Tensor | None:
        """The scale [n] of the inputs of a weight [rows, n]; None for 1."""
        if self.method == "smoothquant":
            return smooth_scale(weight, moments.most(), self.strength)
        return activity_scale(weight, moments.mean(), moments.of_matrix(0)[0], self.grid)

    def quantized(
        self, name: str, weight: Tensor, gram: Tensor | None, tokens: int
    ) -> tuple[QuantizedWeight, str]:
        """The codes of a weight, float64 [rows, n], and the method that made them.

        Args:
            name: our name of the weight.
            gram: the products of its inputs, float64 [n, n]; None without samples.
            tokens: how many inputs these are. GPTQ needs as many as there are columns.
        """
        if gram is None or not tokens or self.method in ("rtn", "smoothquant"):
            return nearest(weight, self.grid), self.method if tokens or gram is None else "rtn (no tokens)"
        if self.method == "awq":
            # Scores are products of two projections, for which the error of one says little.
            scores = name.endswith(("attention.qkv.weight", "attention.query.weight"))
            return (nearest(weight, self.grid) if scores else clipped(weight, gram, self.grid)), "awq"
        if tokens < weight.shape[1]:
            return nearest(weight, self.grid), f"rtn ({tokens} tokens)"
        return self.gptq(name, weight, gram, self.grid), "gptq"
