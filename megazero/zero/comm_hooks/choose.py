"""`choose_comm_hook`: the hook of each bucket, as a table."""

from __future__ import annotations

from dataclasses import dataclass

from megazero.mpu.context import ParallelContext
from megazero.mpu.group import Group
from megazero.zero.comm_hooks.comm_hook import CommHook
from megazero.zero.comm_hooks.exact import ExactCommHook
from megazero.zero.comm_hooks.gradients import QuantizedGradients, Rounding
from megazero.zero.comm_hooks.node import NodeCommHook
from megazero.zero.comm_hooks.weights import QuantizedWeights
from megazero.zero.layout import BucketLayout
from megazero.zero.plan import BucketKey
from megazero.zero.policy import ZeroPolicy


@dataclass(frozen=True)
class _BucketTraffic:
    """The bucket that needs a hook.

    Attributes:
        key: the properties that its parameters have in common.
        layout: its layout.
        policy: the settings.
        context: the groups.
    """

    key: BucketKey
    layout: BucketLayout
    policy: ZeroPolicy
    context: ParallelContext

    @property
    def travels(self) -> bool:
        """Whether there is another replica to send anything to."""
        return self.layout.ranks > 1

    @property
    def hops(self) -> tuple[Group, ...]:
        """The groups over which gradients are summed: replicas of experts know no nodes."""
        context = self.context
        if self.key.replicas == "replica" and context.node.size > 1 and context.peers.size > 1:
            return context.node, context.peers
        return (context.groups[self.key.replicas],)


def _with_gradient_codes(comm_hook: CommHook, bucket: _BucketTraffic) -> CommHook:
    codes, sharded = bucket.policy.codes.gradients, bucket.key.trainable and bucket.layout.row.shard_state
    if codes is None or not (bucket.key.compressed and sharded and bucket.travels):
        return comm_hook
    rounding = Rounding(codes, bucket.policy.codes.rounding_seed)
    return QuantizedGradients(comm_hook, bucket.layout, bucket.hops, rounding)


def _with_weight_codes(comm_hook: CommHook, bucket: _BucketTraffic) -> CommHook:
    """Gather codes, unless the gathered weights are masters: whole weights of the masters' dtype."""
    row, key, policy = bucket.layout.row, bucket.key, bucket.policy
    apart = row.shard_params or (key.trainable and row.shard_state and key.dtype != policy.dtypes.main)
    if policy.codes.weights is None or not (key.compressed and apart and bucket.travels):
        return comm_hook
    return QuantizedWeights(comm_hook, bucket.layout, policy.codes.weights)


def _with_second_partition(comm_hook: CommHook, bucket: _BucketTraffic) -> CommHook:
    sharded = bucket.layout.row.shard_params and bucket.key.replicas == "replica"
    if bucket.policy.gathers.hpz == 1 or not sharded:
        return comm_hook
    return NodeCommHook(comm_hook, bucket.context.node)


# Each puts another hook around the one given, if the bucket has use for it; from the inside out.
_AROUND = (_with_gradient_codes, _with_weight_codes, _with_second_partition)


def choose_comm_hook(
    key: BucketKey, layout: BucketLayout, policy: ZeroPolicy, context: ParallelContext
) -> CommHook:
    """The hook of a bucket.

    Args:
        key: the properties that its parameters have in common.
        layout: its layout.
        policy: the settings.
        context: the groups.
    """
    bucket = _BucketTraffic(key, layout, policy, context)
    group = context.groups[key.replicas]
    comm_hook: CommHook = ExactCommHook(
        group,
        layout,
        policy.dtypes.reduce,
        leave_sums=policy.needs.reduces,
        gathers=context.groups.get(f"{key.replicas}_gather", group),
    )
    for wrap in _AROUND:
        comm_hook = wrap(comm_hook, bucket)
    return comm_hook
