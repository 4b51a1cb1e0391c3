"""The inputs that a micro-batch gives to every layer besides the hidden states."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from megazero.layers.rows import Rows, keys_at
from megazero.mpu.rng import site_key
from megazero.ops.attention import ALL, AttentionCall, Bias, Pattern
from megazero.ops.counter_random import derive
from megazero.ops.dropout import AttentionDropout, Dropout

# The work that backward has left: each call adds one weight's gradient to its `grad` and returns the weight.
Deferred = list[Callable[[], nn.Parameter]]


Unpacked = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Keys [t, b, g, d] and values [t, b, g, e] of two parts that were kept of the same positions."""

Watch = Callable[[Tensor, Tensor, AttentionCall], None]
"""(queries [s, b, n, d], keys [t, b, g, d], call) -> nothing: sees attention before it is computed."""

PLACES = ("attention", "attention_out", "mlp_out")
"""The places where a layer draws random numbers: attention probabilities, and the outputs of its halves.

A decoder's layers draw at "cross_out" too. These are never compiled, so nobody makes its keys ahead.
"""


class Site(NamedTuple):
    """A place where one layer drops hidden states: its name among the layer's, and its constant."""

    place: str
    key: int


def hidden_sites(layer: int) -> dict[str, Site]:
    """The places where a layer drops hidden states, by name; a layer asks once, as it is made."""
    places = ("attention_out", "cross_out", "mlp_out")
    return {place: Site(place, site_key("hidden", layer, place)) for place in places}


@dataclass(frozen=True)
class Attends:
    """The settings of one layer's attention.

    Attributes:
        layer: the layer's number.
        causal: whether a position attends only to itself and earlier ones.
        dropout: the share of probabilities that is dropped.
        pattern: which keys a position attends to by its place, besides causality.
        scale: the factor of the products of queries and keys; None: 1 / sqrt(d).
        unpacked: computes keys and values from what a layer keeps of earlier positions between generation
            steps, two tensors [t, b, ...]; None if it keeps keys and values.
        watch: sees the attention calls of passes that train; None for none.
    """

    layer: int
    causal: bool
    dropout: float = 0.0
    pattern: Pattern = ALL
    scale: float | None = None
    unpacked: Unpacked | None = None
    watch: Watch | None = None

    @property
    def watching(self) -> Watch | None:
        """The watch of this pass; none without gradients, as in evaluations and in what is made again."""
        return self.watch if torch.is_grad_enabled() else None

    def see(self, q: Tensor, k: Tensor, call: AttentionCall) -> None:
        """Show a call of this pass to whoever watches."""
        if (watch := self.watching) is not None:
            watch(q, k, call)

    def scale_of(self, q: Tensor) -> float:
        """The factor of the products of queries [..., d] and keys."""
        return 1 / math.sqrt(q.shape[-1]) if self.scale is None else self.scale

    def keys_and_values(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values, from the two tensors that were kept."""
        return (first, second) if self.unpacked is None else self.unpacked(first, second)


class AttentionCore(Protocol):
    """Attention between the projections of a layer (see `attention_cores`)."""

    @property
    def mixer_states(self) -> MutableMapping[int, tuple[Tensor, ...]]:
        """By layer, the states of mixers, which keep no keys; a core without earlier rows has none."""
        return {}

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        inputs: LayerInputs,
        attends: Attends,
        bias: Bias | None,
        offset: Tensor | None = None,
    ) -> Tensor:
        """Compute the context [s or r, b, n e] of a layer's rows.

        Args:
            q: [s, b, n, d]; if the inputs want some rows only, the context is of these.
            k, v: [s, b, g, d] and [s, b, g, e].
            inputs: the layer's inputs, which say what rows these are.
            attends: the layer's settings.
            bias: a bias of the scaled scores, broadcastable to [b, n, r, s]; or the heads' ALiBi slopes; or a
                softcap; or None.
            offset: [n], a logit for each head whose exponential is added to the softmax's denominator (see
                `with_softmax_offset`); None for none.
        """


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
        rows: all rows of the hidden states, even where this rank has only a share of them.
        core: the attention core of this pass, such as generation's, which keeps keys and values of earlier
            rows; None for the layers' own.
        deferred: the list to which backward adds the computation of the linear layers' weight gradients (the
            weight half of a split backward, Qi et al. 2023); None: backward computes them.
        wanted: int64 [r, b], the only rows of each sequence whose results are needed; the layer still attends
            to all rows. Set for the last layer only; None for all rows.
        skipping: the tokens and layers that the step leaves out.
        branch_scale: the factor of a layer's contribution to the hidden states.
        site_keys: int64 [b] or [s, b] by place, the random keys of one layer, made ahead so that compiled
            code does not depend on the layer's number; None if the layer makes them.
    """

    rows: Rows
    core: AttentionCore | None = None
    deferred: Deferred | None = None
    wanted: Tensor | None = None
    skipping: Skipping = NOTHING_SKIPPED
    branch_scale: float = 1.0
    site_keys: Mapping[str, Tensor] | None = None

    @property
    def generating(self) -> bool:
        """Whether the rows continue earlier ones, which the core remembers."""
        return self.core is not None

    def at(self, layer: int) -> LayerInputs:
        """The inputs of one layer, with the keys of its random streams."""
        if self.rows.keys is None:
            return self
        return replace(self, site_keys={place: self.keys_of(layer, place) for place in PLACES})

    def keys_of(self, layer: int, place: str) -> Tensor:
        """The keys of a layer's random stream at one of `PLACES`."""
        if self.site_keys is not None:
            return self.site_keys[place]
        return self._derived(*(("attention", layer) if place == "attention" else ("hidden", layer, place)))

    def narrow(self, x: Tensor) -> Tensor:
        """The wanted rows of x [s, b, ...]: [r, b, ...]."""
        if self.wanted is None:
            return x
        return x[self.wanted, torch.arange(x.shape[1], device=x.device)]

    def narrowed(self) -> LayerInputs:
        """The inputs of the wanted rows alone, for use after attention."""
        if self.wanted is None:
            return self
        return replace(self, rows=replace(self.rows, documents=None, rotary=None)).of(self.wanted)

    def of(self, columns: Tensor) -> LayerInputs:
        """The inputs of the rows `columns` [r, b] (int64) of each sequence, as a batch of their own."""
        sites = self.site_keys
        if sites is not None:
            sites = {place: keys_at(keys, columns) for place, keys in sites.items()}
        return replace(self, rows=self.rows.select(columns), wanted=None, site_keys=sites)

    def dropout(self, p: float, site: int) -> Dropout | None:
        """The dropout of this rank's rows of hidden states at a place of the model (see `site_key`)."""
        if self.rows.keys is None or p == 0.0:
            return None
        return self.rows.dropout(p, self.rows.keys, site)

    def layer_dropout(self, p: float, site: Site) -> Dropout | None:
        """The dropout of a layer's contribution to this rank's rows."""
        if p == 0.0:
            return None
        if self.rows.keys is None or self.site_keys is None:
            return self.dropout(p, site.key)
        return self.rows.dropout(p, self.site_keys[site.place])

    def attention_dropout(self, attends: Attends, first: int) -> AttentionDropout | None:
        """The dropout of the probabilities of the heads from `first` on, for the wanted rows over all."""
        rows, wanted = self.rows, self.wanted
        if rows.keys is None or attends.dropout == 0.0:
            return None
        keys = keys_at(self.keys_of(attends.layer, "attention"), wanted)
        return AttentionDropout(attends.dropout, keys, rows.positions_at(wanted), rows.positions, first)

    def _derived(self, *site: str | int) -> Tensor:
        assert self.rows.keys is not None, "without keys nothing is drawn"
        return derive(site_key(*site), self.rows.keys)
