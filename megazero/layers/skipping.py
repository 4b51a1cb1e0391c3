"""Tokens and layers that a step leaves out (random-LTD and progressive layer drop)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from megazero.layers.collectives import gather_for_parts, own_rows
from megazero.layers.inputs import LayerInputs
from megazero.layers.rows import ALONE, Spread
from megazero.layers.sums import Sums
from megazero.mpu.rng import site_key
from megazero.ops.chosen_rows import chosen_rows
from megazero.ops.counter_random import derive
from megazero.ops.kept_columns import kept_columns as kept_by_key

Layers = tuple[Tensor, Sums]


def kept_columns(sample_keys: Tensor, layer: int, length: int, kept: int) -> Tensor:
    """The tokens of each sequence that a layer sees: int64 [kept, b], ascending in each column.

    Each set of `kept` of the `length` tokens is equally likely. The choice is a function of the sample's key
    and the layer, so all ranks that hold a part of the sequence agree on it and recompute repeats it.

    Args:
        sample_keys: int64 [b].
    """
    return kept_by_key(derive(site_key("kept", layer), sample_keys), length, kept)


def run_layer(
    layer: nn.Module, x: Tensor, inputs: LayerInputs, per_token: frozenset[str] = frozenset()
) -> Layers:
    """Apply a layer as far as the step's `inputs.skipping` wants it.

    Tokens that the layer does not see bypass it unchanged (random-LTD, Yao et al. 2022), and so do all tokens
    if the layer is left out (progressive layer drop, Zhang & He 2020). The other tokens keep the rotary
    angles, dropout masks and document masks of their positions among all tokens.

    Args:
        layer: a layer with a `layer` number.
        x: [s, b, h], or [s/tp, b, h] under sequence parallelism.
        inputs: the inputs of all tokens.
        per_token: the names of the sums over tokens. If the layer sees r of s tokens, these sums are
            multiplied by s / r, as they will be divided by the number of all tokens.
    """
    skipping = inputs.skipping
    if skipping.idle:
        return _run(layer, x, inputs)
    number = layer.layer
    assert isinstance(number, int), "a layer knows its number"
    scale = skipping.scale_of(number)
    if scale == 0.0:
        return inputs.narrow(x), Sums()
    inputs = replace(inputs, branch_scale=scale)
    length = inputs.rows.whole_length
    kept = skipping.kept_by(number, length)
    if kept == length:
        return _run(layer, x, inputs)
    assert inputs.rows.keys is not None, "the choice is a function of the samples' keys"
    columns = kept_columns(inputs.rows.keys, number, length, kept)
    rows = KeptRows.of(columns, length, inputs.rows.spread)
    out, sums = _run(layer, rows.taken(x), inputs.of(columns))
    x = rows.put_back(x, out.to(x.dtype))
    terms = {
        name: value * (length / kept) if name in per_token else value for name, value in sums.terms.items()
    }
    return inputs.narrow(x), Sums(terms, sums.tallies)


def _run(layer: nn.Module, x: Tensor, inputs: LayerInputs) -> Layers:
    result: Layers = layer(x, inputs)
    return result


@dataclass(frozen=True)
class KeptRows:
    """The rows of the kept tokens among the flattened rows of hidden states [s, b, h].

    Attributes:
        numbers: int64 [r b], the row of each kept token.
        places: int64 [s b], the place of each row among the kept ones; -1 if it is left out.
        columns: b.
        spread: how the rows lie on ranks. Where several hold them, rows and kept tokens are numbered in the
            order in which those of all ranks follow each other.
    """

    numbers: Tensor
    places: Tensor
    columns: int
    spread: Spread

    @classmethod
    def of(cls, columns: Tensor, length: int, spread: Spread = ALONE) -> KeptRows:
        """The rows of the tokens `columns` [r, b] in b sequences of `length` tokens."""
        b, device = columns.shape[1], columns.device
        order = spread.gathered_order(length)
        if order is not None:
            row_of = torch.empty_like(order).scatter_(0, order, torch.arange(length)).to(device)
            kept_order = spread.gathered_order(len(columns))
            assert kept_order is not None, "rows and kept tokens lie in the same way"
            columns = row_of[columns[kept_order.to(device)]]
        numbers = (columns * b + torch.arange(b, device=device)).flatten()
        places = numbers.new_full((length * b,), -1)
        places[numbers] = torch.arange(len(numbers), device=device)
        return cls(numbers, places, b, spread)

    def taken(self, x: Tensor) -> Tensor:
        """The kept rows of x: [r, b, h], or a rank's share of them."""
        numbers, places, group = self.numbers, self.places, self.spread.parts
        if group.size > 1:
            x, numbers = gather_for_parts(x, group), own_rows(numbers, group)
            places = _within(places, group.rank * len(numbers), len(numbers))
        rows = chosen_rows(x.flatten(0, 1), numbers, places)
        taken: Tensor = rows.unflatten(0, (-1, self.columns))
        return taken

    def put_back(self, x: Tensor, out: Tensor) -> Tensor:
        """x with the kept rows replaced by `out`."""
        numbers, places, group = self.numbers, self.places, self.spread.parts
        if group.size > 1:
            out, places = gather_for_parts(out, group), own_rows(places, group)
            numbers = _within(numbers, group.rank * len(places), len(places))
        return chosen_rows(out.flatten(0, 1), places, numbers, x.flatten(0, 1)).view(x.shape)


def _within(numbers: Tensor, first: int, size: int) -> Tensor:
    """Subtract `first`; -1 for numbers outside [first, first + size)."""
    return torch.where((numbers >= first) & (numbers < first + size), numbers - first, -1)
