"""Which parameters share a bucket: a pure function over what is known of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from megazero.mpu import ParamSpec
from megazero.zero.policy import ZeroPolicy
from megazero.zero.table import STAGES


@dataclass(frozen=True)
class Slot:
    """What planning needs to know of one parameter.

    Attributes:
        spec: where it lives.
        numel: elements on this tensor-parallel rank.
        dtype: of its weights.
        chunk: model chunk that uses it.
        unit: number of the first unit that uses it.
        trainable: whether it gets gradients.
        alone: whether it is used at several places (tied, reused), and has a bucket of its own.
        group: number of its parameter group, which has a learning rate and weight decay of its own.
    """

    spec: ParamSpec
    numel: int
    dtype: torch.dtype
    chunk: int = 0
    unit: int = 0
    trainable: bool = True
    alone: bool = False
    group: int = 0

    @property
    def kind(self) -> tuple:
        """What norm and update tell apart within a bucket; the same on every tensor-parallel rank."""
        spec = self.spec
        replicated, copy = spec.shard_dim is None, spec.tied_with is not None
        return (self.group, not spec.weight_decay, replicated, copy, spec.partial_grad)


@dataclass(frozen=True)
class BucketKey:
    """What the parameters of one bucket have in common.

    Attributes:
        chunk: model chunk whose backward fills it.
        dtype: of the weights.
        expert: whether they belong to experts (replicated over other ranks than dense parameters).
        trainable: whether they get gradients.
        row: number of its row of `table.STAGES`.
    """

    chunk: int
    dtype: torch.dtype
    expert: bool
    trainable: bool
    row: int


def plan_buckets(
    slots: Sequence[Slot], policy: ZeroPolicy, replicas: Callable[[bool], int]
) -> list[tuple[BucketKey, list[int]]]:
    """The buckets in the order in which backward completes them: (key, parameter numbers).

    Backward reaches the last parameters first, so numbers are dealt in reverse; a bucket closes when the
    next parameter would take it beyond the policy's size (one larger parameter is a bucket alone). Within a
    bucket, parameters of one kind are adjacent. Where weights are sharded, no bucket spans units.

    Args:
        slots: in the order in which forward uses them.
        replicas: number of ranks that hold the same parameters: dense ones (False) or experts (True).
    """
    done: list[tuple[BucketKey, list[int]]] = []
    open_: dict[tuple, list[int]] = {}
    for i in reversed(range(len(slots))):
        slot = slots[i]
        row = _row(slot, policy, replicas(slot.spec.expert))
        key = BucketKey(slot.chunk, slot.dtype, slot.spec.expert, slot.trainable, row)
        place = (key, slot.unit if STAGES[row].shard_params else None)
        members = None if slot.alone else open_.get(place)
        if members is None or sum(slots[m].numel for m in members) + slot.numel > policy.bucket_size:
            members = []
            done.append((key, members))
            if not slot.alone:
                open_[place] = members
        members.append(i)
    # Reductions start in this order: one that is complete late must not hold up the others.
    done.sort(key=lambda bucket: -min(bucket[1]))
    for _, members in done:
        members.sort(key=lambda i: (slots[i].kind, i))
    return done


def _row(slot: Slot, policy: ZeroPolicy, replicas: int) -> int:
    """The row of one parameter: the policy's, unless there is nothing to cut or nothing to gain."""
    if replicas == 1:
        return 0
    row = policy.stage
    if STAGES[row].shard_params and (
        slot.numel < policy.persistence_threshold or not slot.dtype.is_floating_point
    ):
        row -= 1
    return row if slot.trainable or STAGES[row].shard_params else 0
