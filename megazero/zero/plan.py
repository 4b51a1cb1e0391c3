"""`plan_buckets`: which parameters share a bucket, a pure function of a few facts about each."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from megazero.mpu.param_spec import ParamSpec, copy_axes
from megazero.zero.policy import ZeroPolicy
from megazero.zero.table import STAGES


@dataclass(frozen=True)
class ParameterUse:
    """Where a model uses a parameter.

    Attributes:
        chunk: model chunk that uses it.
        unit: number of the first unit that uses it.
        alone: whether it is used in several places (tied, reused) and therefore has its own bucket.
    """

    chunk: int = 0
    unit: int = 0
    alone: bool = False


@dataclass(frozen=True)
class BucketMember:
    """The facts about one parameter that planning and layout need.

    Attributes:
        spec: the parameter's spec.
        shape: shape of this rank's slice.
        dtype: dtype of its weights.
        use: where it is used.
        trainable: whether it gets gradients.
        group: number of its parameter group, which has its own learning rate and weight decay.
        order: where it comes among the parameters of the model; sorts alike on all ranks and layouts.
    """

    spec: ParamSpec
    shape: tuple[int, ...]
    dtype: torch.dtype
    use: ParameterUse = ParameterUse()
    trainable: bool = True
    group: int = 0
    order: tuple[int, ...] = ()

    @property
    def numel(self) -> int:
        """Number of elements of this rank's slice."""
        return math.prod(self.shape)

    @property
    def kind(self) -> tuple[object, ...]:
        """The traits by which the norm and the update tell members apart; the same on every rank."""
        return (self.group, *self.spec.traits)


@dataclass(frozen=True)
class BucketKey:
    """The properties that the parameters of one bucket have in common.

    Attributes:
        chunk: model chunk whose backward fills the bucket.
        dtype: dtype of the weights.
        replicas: name of the communicator over the ranks that hold the same parameters.
        trainable: whether the parameters get gradients.
        row: index of the bucket's row in `table.STAGES`.
        compressed: whether its weights and gradients may travel as codes.
        matrices: whether they are made of matrices, which have a rule of their own.
    """

    chunk: int
    dtype: torch.dtype
    replicas: str
    trainable: bool
    row: int
    compressed: bool = False
    matrices: bool = False


def plan_buckets(
    params: Sequence[BucketMember], policy: ZeroPolicy, group_size: Callable[[str], int]
) -> list[tuple[BucketKey, list[int]]]:
    """The buckets in the order in which backward completes them: (key, parameter numbers).

    Backward reaches the last parameters first, so they are assigned in reverse order; a bucket closes when
    the next parameter would take it beyond the policy's size (a larger parameter gets its own bucket). Within
    a bucket, parameters of one kind are adjacent. Where weights are sharded, no bucket spans units.

    Args:
        params: the parameters in the order in which forward uses them.
        policy: the stage and the sizes.
        group_size: number of ranks of a communicator, by its name.
    """
    done: list[tuple[BucketKey, list[int]]] = []
    open_: dict[tuple[BucketKey, int | None], list[int]] = {}
    for i in reversed(range(len(params))):
        param = params[i]
        row = _row(param, policy, group_size(param.spec.replicas))
        compressed = _compressed(param, policy, group_size)
        matrices = policy.needs.matrices and param.spec.matrices is not None
        key = BucketKey(
            param.use.chunk, param.dtype, param.spec.replicas, param.trainable, row, compressed, matrices
        )
        place = (key, param.use.unit if STAGES[row].shard_params else None)
        members = None if param.use.alone else open_.get(place)
        if members is None or sum(params[m].numel for m in members) + param.numel > policy.bucket_size:
            members = []
            done.append((key, members))
            if not param.use.alone:
                open_[place] = members
        members.append(i)
    # Reductions start in this order: a bucket that completes late must not hold up the others.
    done.sort(key=lambda bucket: -min(bucket[1]))
    for _, members in done:
        members.sort(key=lambda i: (params[i].kind, i))
    return done


def _row(param: BucketMember, policy: ZeroPolicy, replicas: int) -> int:
    """The row of one parameter: the policy's, unless there is nothing to shard or nothing to gain."""
    if replicas == 1 and not policy.shard_alone:
        return 0
    row = policy.stage
    if STAGES[row].shard_params and (
        param.numel < policy.gathers.persistence_threshold or not param.dtype.is_floating_point
    ):
        row -= 1
    return row if param.trainable or STAGES[row].shard_params else 0


def _compressed(param: BucketMember, policy: ZeroPolicy, group_size: Callable[[str], int]) -> bool:
    """Whether a parameter may travel as codes.

    Vectors, and biases of any shape (all that weight decay leaves out), may not: they are few, and sensitive.
    Nor may parameters that a model holds copies of: beside other neighbours in a block, each copy would be
    rounded to other bits.
    """
    if policy.codes.weights is None and policy.codes.gradients is None:
        return False
    copied = any(group_size(axis) > 1 for axis in copy_axes(param.spec))
    matrix = len(param.shape) > 1 and param.spec.weight_decay
    return matrix and not copied and param.dtype.is_floating_point
