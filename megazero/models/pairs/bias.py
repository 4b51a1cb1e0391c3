"""T5's relative position biases: each head adds a learned number for the distance to the key to a score."""

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
    """Map distances (position of the key less that of the query) to buckets, int64 of the same shape.

    With `both_ways`, half of the buckets are for later keys; otherwise later keys are in bucket 0. Half of
    the (remaining) buckets are single distances, the others ranges that grow logarithmically up to
    `furthest`. `buckets` must be at least 4, and `furthest` more than half of it.
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
    """The biases of the encoder, [1, n/tp, s, s], and of the decoder, [1, n/tp, t, k] over k keys.

    Every stage of a pipeline has both tables, whatever its layers.

    Args:
        original: whether this stage has the original tables, of which the other stages have copies.
    """

    def __init__(self, spec: ModelSpec, placement: Placement, *, original: bool):
        super().__init__()
        assert spec.relative is not None, "the model has no relative biases"
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
        """Compute the biases of the encoder's and of the decoder's queries, given their positions.

        The encoder's keys are at the same positions, the decoder's from 0 to the last query. None gives None.
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
