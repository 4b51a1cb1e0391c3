"""`TiledLinear`: a linear layer of tiles, which ZeRO stage 3 gathers one at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from megazero.deepspeed.utils.split import partition_uniform
from megazero.deepspeed.zero.gathered import GatheredParameters
from megazero.errors import ConfigError


class TiledLinear(nn.Module):
    """A linear layer whose weight is split into tiles: ``linears[out][in]`` are layers of their own.

    Args:
        in_features, out_features, bias: as in `torch.nn.Linear`.
        in_splits: number of tiles along the input.
        out_splits: number of tiles along the output.
        input_is_already_split: whether `forward` gets a sequence of `in_splits` inputs.
        combine_out_splits: whether the outputs are concatenated; if not, `forward` returns a list.
        linear_cls: makes a tile from ``(in_features, out_features, bias=...)``.
        init_linear: a layer whose weights are copied to the tiles.
        kwargs: further arguments for `linear_cls`.

    Raises:
        ConfigError: there are more tiles than features, or none.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        input_is_already_split: bool = False,
        combine_out_splits: bool = True,
        linear_cls: Callable[..., nn.Module] = nn.Linear,
        init_linear: nn.Linear | None = None,
        **kwargs: object,
    ):
        super().__init__()
        self.in_features, self.out_features, self.use_bias = in_features, out_features, bias
        self.in_splits, self.out_splits = in_splits, out_splits
        self.input_is_already_split, self.combine_out_splits = input_is_already_split, combine_out_splits
        self.in_parts = _bounds(in_features, in_splits, "in_splits")
        self.out_parts = _bounds(out_features, out_splits, "out_splits")
        # Only the last tile of a row has the bias, because the row's outputs are summed.
        self.linears = nn.ModuleList(
            nn.ModuleList(
                linear_cls(right - left, bottom - top, bias=bias and right == in_features, **kwargs)
                for left, right in pairwise(self.in_parts)
            )
            for top, bottom in pairwise(self.out_parts)
        )
        if init_linear is not None:
            self.copy_params_from(init_linear)

    def forward(self, input_: Any) -> Any:
        """Compute the output [..., out], or the list of its `out_splits` parts.

        Raises:
            ConfigError: the input is split into another number of parts.
        """
        parts = [input_] if self.in_splits == 1 else input_
        if self.in_splits > 1 and not self.input_is_already_split:
            parts = input_.split([right - left for left, right in pairwise(self.in_parts)], dim=-1)
        if len(parts) != self.in_splits:
            raise ConfigError(
                f"`input_` must be split into `in_splits` parts ({self.in_splits}), but has {len(parts)}"
            )
        rows = [
            self._sum([tile(part) for tile, part in zip(row.children(), parts, strict=True)])
            for row in self.linears
        ]
        return self._join(rows) if self.combine_out_splits else rows

    def _sum(self, outputs: Sequence[Any]) -> Any:
        """Sum the outputs of the tiles of a row."""
        total = outputs[0]
        for output in outputs[1:]:
            total = total + output
        return total

    def _join(self, rows: Sequence[Any]) -> Any:
        """Concatenate the outputs of all rows."""
        return torch.cat(list(rows), dim=-1)

    @torch.no_grad()
    def copy_params_from(self, other: nn.Linear) -> None:
        """Copy the weights of a whole layer, those of rank 0; every rank calls this.

        Raises:
            ConfigError: the layer has other sizes, or only one of the two has a bias.
        """
        wanted = (self.out_features, self.in_features, self.use_bias)
        sizes = (*other.weight.shape, other.bias is not None)
        if wanted != sizes:
            raise ConfigError(f"`other` must have the sizes (out, in, bias) {wanted}, but has {sizes}")
        with GatheredParameters(list(other.parameters())):
            for row, (top, bottom) in zip(self.linears, pairwise(self.out_parts), strict=True):
                for tile, (left, right) in zip(row.children(), pairwise(self.in_parts), strict=True):
                    with GatheredParameters(tile.parameters(), modifier_rank=0):
                        own = dict(tile.named_parameters(recurse=False))
                        own["weight"].copy_(other.weight[top:bottom, left:right])
                        if "bias" in own:
                            own["bias"].copy_(other.bias[top:bottom])


class TiledLinearReturnBias(TiledLinear):
    """`TiledLinear` of layers that return (output, bias), for the caller to add."""

    def _sum(self, outputs: Sequence[tuple[Tensor, Tensor | None]]) -> tuple[Tensor, Tensor | None]:
        biases = [bias for _, bias in outputs if bias is not None]
        return super()._sum([output for output, _ in outputs]), biases[-1] if biases else None

    def _join(self, rows: Sequence[tuple[Tensor, Tensor | None]]) -> tuple[Tensor, Tensor | None]:
        biases = [bias for _, bias in rows if bias is not None]
        return super()._join([output for output, _ in rows]), super()._join(biases) if biases else None


def _bounds(size: int, parts: int, name: str) -> list[int]:
    """The bounds of nearly equal parts, the larger ones first."""
    if not 1 <= parts <= size:
        raise ConfigError(f"`{name}` must be from 1 to the number of features ({size}), but is {parts}")
    return partition_uniform(size, parts)
