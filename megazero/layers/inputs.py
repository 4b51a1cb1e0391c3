"""The inputs that a micro-batch gives to every layer besides the hidden states."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor, nn

from megazero.layers.placement import Placement
from megazero.mpu import site_key
from megazero.ops.counter_random import derive
from megazero.ops.dropout import AttentionDropout, Dropout
from megazero.ops.positions import Positions, position_tensor

# The work that backward has left: each call adds one weight's gradient to its `grad` and returns the weight.
Deferred = list[Callable[[], nn.Parameter]]


PLACES = ("attention", "attention_out", "mlp_out")
"""The places where a layer draws random numbers: attention probabilities, and the outputs of its halves."""


class KeyValueStore(Protocol):
    """Keys and values of earlier positions, kept between generation steps."""

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append [s, b, g, d] of `layer` and return all positions so far, [t, b, g, d]."""


@dataclass(frozen=True)
class Skipping:
    """The tokens and layers that a step leaves out; by default none.

    Attributes:
        kept: the number of tokens of each sequence that the layers in `dropping` see; None for all.
        dropping: the numbers of those layers in the model.
        scales: for each layer of the model, a factor of its contribution to the hidden states; 0 leaves the
            layer out. None for a factor of 1 everywhere.
    """

    kept: int | None = None
    dropping: tuple[int, ...] | range = ()
    scales: tuple[float, ...] | None = None

    @property
    def idle(self) -> bool:
        """Whether nothing is left out."""
        return self.kept is None and self.scales is None

    @property
    def layers_run(self) -> int | None:
        """The number of layers that run; None if the step has no `scales`."""
        return None if self.scales is None else sum(scale != 0.0 for scale in self.scales)

    def scale_of(self, layer: int) -> float:
        """The factor of the layer's contribution to the hidden states."""
        return 1.0 if self.scales is None else self.scales[layer]

    def kept_by(self, layer: int, length: int) -> int:
        """The number of tokens of each sequence of `length` that the layer sees."""
        return length if self.kept is None or layer not in self.dropping else min(self.kept, length)


NOTHING_SKIPPED = Skipping()


@dataclass(frozen=True)
class LayerInputs:
    """The inputs of a layer besides the hidden states.

    Attributes:
        positions: the places of the hidden states' rows in their sequences: a range, or int64 [s], or [s, b]
            where samples differ. All s are given, also under sequence parallelism, where a rank has a share.
        rotary: (cos, sin) tables of the same rows, or None with learned positions.
        document_ids: int [b, s]; positions attend only within equal ids. None: all earlier positions.
        sample_keys: int64 [b], the key of each sample's random streams, or [s, b] where samples share a
            column of rows; None turns dropout off.
        cache: earlier keys and values during generation.
        deferred: the list to which backward adds the computation of the linear layers' weight gradients (the
            weight half of a split backward, Qi et al. 2023); None: backward computes them.
        wanted: int64 [r, b], the rows to which a layer narrows each sequence: every row is attended to, but
            no other is computed any further. Set for the last layer only; None: all rows.
        skipping: the tokens and layers that the step leaves out.
        branch_scale: the factor of a layer's contribution to the hidden states.
        site_keys: int64 [b] or [s, b] by place, the keys of the one layer that these inputs are for, if they
            are made ahead, so that a compiled layer need not know its number, a constant; None: the layer
            makes them.
    """

    positions: Positions
    rotary: tuple[Tensor, Tensor] | None = None
    document_ids: Tensor | None = None
    sample_keys: Tensor | None = None
    cache: KeyValueStore | None = None
    deferred: Deferred | None = None
    wanted: Tensor | None = None
    skipping: Skipping = NOTHING_SKIPPED
    branch_scale: float = 1.0
    site_keys: Mapping[str, Tensor] | None = None

    @property
    def wanted_positions(self) -> Positions:
        """The positions of the wanted rows."""
        if self.wanted is None:
            return self.positions
        positions = position_tensor(self.positions, self.wanted.device)
        return positions[self.wanted] if positions.dim() == 1 else positions.gather(0, self.wanted)

    def at(self, layer: int) -> LayerInputs:
        """The inputs of one layer, with the keys of its random streams."""
        if self.sample_keys is None:
            return self
        return replace(self, site_keys={place: self._keys(layer, place) for place in PLACES})

    def _keys(self, layer: int, place: str) -> Tensor:
        if self.site_keys is not None:
            return self.site_keys[place]
        site = ("attention", layer) if place == "attention" else ("hidden", layer, place)
        assert self.sample_keys is not None, "without keys nothing is drawn"
        return derive(site_key(*site), self.sample_keys)

    def narrow(self, x: Tensor) -> Tensor:
        """The wanted rows of x [s, b, ...]: [r, b, ...]."""
        if self.wanted is None:
            return x
        return x[self.wanted, torch.arange(x.shape[1], device=x.device)]

    def narrowed(self) -> LayerInputs:
        """The inputs of the wanted rows alone."""
        if self.wanted is None:
            return self
        return replace(self._keyed(self._wanted_keys), positions=self.wanted_positions, wanted=None)

    def _wanted_keys(self, keys: Tensor) -> Tensor:
        return keys if self.wanted is None or keys.dim() == 1 else keys.gather(0, self.wanted)

    def _keyed(self, change: Callable[[Tensor], Tensor]) -> LayerInputs:
        """The inputs with `change` applied to each tensor of keys."""
        sites = self.site_keys
        return replace(
            self,
            sample_keys=None if self.sample_keys is None else change(self.sample_keys),
            site_keys=None if sites is None else {place: change(keys) for place, keys in sites.items()},
        )

    def of(self, columns: Tensor) -> LayerInputs:
        """The inputs of the rows `columns` [r, b] (int64) of each sequence, all of which are computed."""
        positions = position_tensor(self.positions, columns.device)
        positions = positions[columns] if positions.dim() == 1 else positions.gather(0, columns)
        rotary, documents = self.rotary, self.document_ids
        if rotary is not None:
            sample = torch.arange(columns.shape[1], device=columns.device)
            cos, sin = (t[columns, sample if t.shape[1] > 1 else 0] for t in rotary)
            rotary = cos, sin
        if documents is not None:
            documents = documents.gather(1, columns.t())
        keyed = self._keyed(lambda keys: keys if keys.dim() == 1 else keys.gather(0, columns))
        return replace(keyed, positions=positions, rotary=rotary, document_ids=documents, wanted=None)

    def dropout(self, p: float, placement: Placement, *site: str | int) -> Dropout | None:
        """The dropout of hidden states [s or s/tp, b, h] at `site` of the model."""
        if self.sample_keys is None or p == 0.0:
            return None
        return self._dropout(p, placement, derive(site_key(*site), self.sample_keys))

    def layer_dropout(self, p: float, placement: Placement, layer: int, place: str) -> Dropout | None:
        """The dropout of a layer's contribution to hidden states [s or s/tp, b, h] at one of `PLACES`."""
        if self.sample_keys is None or p == 0.0:
            return None
        return self._dropout(p, placement, self._keys(layer, place))

    def _dropout(self, p: float, placement: Placement, keys: Tensor) -> Dropout:
        positions = self.positions
        if placement.sequence_parallel:
            rows, rank = len(positions) // placement.tp.size, placement.tp.rank
            own = slice(rank * rows, (rank + 1) * rows)
            positions, keys = positions[own], keys if keys.dim() == 1 else keys[own]
        return Dropout(p, keys, positions)

    def attention_dropout(
        self, p: float, heads: int, placement: Placement, layer: int
    ) -> AttentionDropout | None:
        """The dropout of attention probabilities of this rank's `heads` heads, over all rows."""
        if self.sample_keys is None or p == 0.0:
            return None
        keys = self._wanted_keys(self._keys(layer, "attention"))
        return AttentionDropout(p, keys, self.wanted_positions, self.positions, placement.tp.rank * heads)

    def attention_mask(self) -> Tensor | None:
        """bool [b, 1, r, s]: which rows the wanted ones may attend to; None if all."""
        if self.wanted is None or self.document_ids is None:
            return None
        wanted = self.document_ids.gather(1, self.wanted.t())
        return (wanted.unsqueeze(-1) == self.document_ids.unsqueeze(1)).unsqueeze(1)
