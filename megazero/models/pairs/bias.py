"""T5's relative biases: each head adds to a score a number that depends on how far the key is."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from megazero.layers.placement import Placement
from megazero.mpu.param_spec import Cut, InitialValues, ParamSpec
from megazero.ops.embedding import embedding
from megazero.spec.model import ModelSpec

TABLES = ("encoder.relative_bias.weight", "decoder.relative_bias.weight")
"""The global names of the two tables, which all layers of a stack share."""


def relative_buckets(distances: Tensor, *, both_ways: bool, buckets: int, furthest: int) -> Tensor:
    """The kind of each distance (the key's place less the query's), int64 of the same shape, below `buckets`.

    With `both_ways` half of the kinds are of later keys; otherwise all these are of kind 0. Half of the kinds
    are single distances, and the others ranges that grow as the logarithm up to `furthest`. There are at
    least 4 kinds, and `furthest` is more than half of them.
    """
    first = torch.zeros_like(distances)
    if both_ways:
        buckets //= 2
        first = (distances > 0) * buckets
        distances = distances.abs()
    else:
        distances = -distances.clamp(max=0)
    single = buckets // 2
    share = torch.log(distances.clamp(min=1).float() / single) / math.log(furthest / single)
    ranged = single + (share * (buckets - single)).long()
    return first + torch.where(distances < single, distances, ranged.clamp(max=buckets - 1))


class RelativeBiases(nn.Module):
    """The biases of a micro-batch's encoder and decoder: [1, n/tp, s, s], and [1, n/tp, t, k] to k rows.

    Every stage of a pipeline has both tables, whichever layers it has.

    Args:
        spec: a model with such biases.
        placement: ranks, dtype and device.
        original: whether these are the ones that the others are copies of.
    """

    def __init__(self, spec: ModelSpec, placement: Placement, *, original: bool):
        super().__init__()
        assert spec.relative is not None, "a stage without such biases builds none"
        self.buckets, self.furthest = spec.relative.kinds, spec.relative.furthest
        heads = max(attention.heads for attention in spec.attentions())

        def table(name: str) -> nn.Parameter:
            place = ParamSpec(
                name,
                (self.buckets, heads),
                InitialValues("normal", spec.stream.std),
                (Cut(1, "tp"),),
                tied_with=None if original else name,
                sharers="pp",
            )
            return placement.parameter(place)

        self.encoder, self.decoder = map(table, TABLES)

    def forward(self, encoded: range | None, decoded: range | None) -> tuple[Tensor | None, Tensor | None]:
        """The biases between the encoder's places, and from the decoder's to all of its up to the last.

        None for places gives None.
        """
        encoder = decoder = None
        if encoded is not None:
            encoder = self._of(self.encoder, encoded, encoded, both_ways=True)
        if decoded is not None:
            decoder = self._of(self.decoder, decoded, range(decoded.stop), both_ways=False)
        return encoder, decoder

    def _of(self, table: nn.Parameter, queries: range, keys: range, *, both_ways: bool) -> Tensor:
        q, k = (torch.arange(x.start, x.stop, device=table.device) for x in (queries, keys))
        numbers = relative_buckets(
            k - q.unsqueeze(1), both_ways=both_ways, buckets=self.buckets, furthest=self.furthest
        )
        return embedding(numbers, table, 0, self.buckets).permute(2, 0, 1).unsqueeze(0)
