"""Buckets: flat buffers that parameters live in, so that one call reduces or updates many of them.

Parameters share a bucket only where they are treated alike, which is what `BucketKey` lists.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megazero.mpu import ParamSpec, spec_of


@dataclass(frozen=True)
class BucketKey:
    """What the parameters of one bucket have in common.

    Attributes:
        dtype: of the weights.
        expert: whether they belong to experts (replicated over other ranks than dense parameters).
        weight_decay: whether they decay.
        sharded: whether each tensor-parallel rank holds another slice.
        partial_grad: whether their gradients must be summed over the tensor-parallel ranks.
    """

    dtype: torch.dtype
    expert: bool
    weight_decay: bool
    sharded: bool
    partial_grad: bool

    @classmethod
    def of(cls, spec: ParamSpec, dtype: torch.dtype) -> BucketKey:
        return cls(dtype, spec.expert, spec.weight_decay, spec.shard_dim is not None, spec.partial_grad)


def plan_buckets(
    specs: Sequence[ParamSpec], sizes: Sequence[int], dtypes: Sequence[torch.dtype], limit: int
) -> list[tuple[BucketKey, list[int]]]:
    """Which parameters share a bucket: (key, parameter numbers), in the order gradients appear.

    Backward reaches the last parameters first, so numbers are dealt in reverse; a bucket closes when
    the next parameter would take it beyond `limit` elements (one larger parameter is a bucket alone).
    """
    done: list[tuple[BucketKey, list[int]]] = []
    open_: dict[BucketKey, list[int]] = {}
    for i in reversed(range(len(specs))):
        key = BucketKey.of(specs[i], dtypes[i])
        members = open_.get(key)
        if members is None or sum(sizes[m] for m in members) + sizes[i] > limit:
            members = open_[key] = []
            done.append((key, members))
        members.append(i)
    return done


class Bucket:
    """Parameters in one flat buffer, and their fp32 gradient sums in another.

    Attributes:
        weights: flat, of the key's dtype; the parameters' data are views of it.
        grads: flat fp32 of the same length.
    """

    def __init__(self, key: BucketKey, params: Sequence[nn.Parameter]):
        self.key = key
        self.params = list(params)
        self.specs = [spec_of(p) for p in self.params]
        self.numel = sum(p.numel() for p in self.params)
        device = self.params[0].device
        self.weights = torch.empty(self.numel, dtype=key.dtype, device=device)
        self.grads = torch.zeros(self.numel, dtype=torch.float32, device=device)
        for param, view in zip(self.params, self.views(self.weights), strict=True):
            view.copy_(param.data)
            param.data = view

    def views(self, flat: Tensor) -> list[Tensor]:
        """Each parameter's part of a flat tensor, in its shape."""
        shapes = [p.shape for p in self.params]
        pieces = flat.split([shape.numel() for shape in shapes])
        return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]

    def named(self, flat: Tensor) -> Iterable[tuple[ParamSpec, Tensor]]:
        """Each parameter's spec and part of a flat tensor."""
        return zip(self.specs, self.views(flat), strict=True)


def build_buckets(model: nn.Module, limit: int) -> list[Bucket]:
    """Move `model`'s parameters into buckets of at most `limit` elements."""
    params = [p for p in model.parameters() if p.requires_grad]
    plan = plan_buckets(
        [spec_of(p) for p in params], [p.numel() for p in params], [p.dtype for p in params], limit
    )
    return [Bucket(key, [params[i] for i in members]) for key, members in plan]
