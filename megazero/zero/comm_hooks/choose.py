"""`choose_comm_hook`: which bucket travels how, as a table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megazero.mpu import Group, ParallelContext
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
        key: what its parameters have in common.
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


def _sends_gradient_codes(bucket: _BucketTraffic) -> bool:
    sharded = bucket.key.trainable and bucket.layout.row.shard_state
    return bucket.policy.gradient_codes is not None and bucket.key.compressed and sharded and bucket.travels


def _sends_weight_codes(bucket: _BucketTraffic) -> bool:
    """Gathered weights must not be masters, which they are if weights are whole and of the masters' dtype."""
    row, key, policy = bucket.layout.row, bucket.key, bucket.policy
    apart = row.shard_params or (key.trainable and row.shard_state and key.dtype != policy.main_dtype)
    return policy.weight_codes is not None and key.compressed and apart and bucket.travels


def _has_second_partition(bucket: _BucketTraffic) -> bool:
    return bucket.policy.hpz > 1 and bucket.layout.row.shard_params and bucket.key.replicas == "replica"


_Predicate = Callable[[_BucketTraffic], bool]
_Wrap = Callable[[CommHook, _BucketTraffic], CommHook]

# From the inside out: what is put around the exact hook of a bucket, if the predicate holds.
_AROUND: tuple[tuple[_Predicate, _Wrap], ...] = (
    (
        _sends_gradient_codes,
        lambda comm_hook, b: QuantizedGradients(
            comm_hook, b.layout, b.hops, Rounding(b.policy.gradient_codes, b.policy.rounding_seed)
        ),
    ),
    (_sends_weight_codes, lambda comm_hook, b: QuantizedWeights(comm_hook, b.layout, b.policy.weight_codes)),
    (_has_second_partition, lambda comm_hook, b: NodeCommHook(comm_hook, b.context.node)),
)


def choose_comm_hook(
    key: BucketKey, layout: BucketLayout, policy: ZeroPolicy, context: ParallelContext
) -> CommHook:
    """The hook of a bucket.

    Args:
        key: what its parameters have in common.
        layout: its layout.
        policy: the settings.
        context: the groups.
    """
    bucket = _BucketTraffic(key, layout, policy, context)
    group = context.groups[key.replicas]
    comm_hook: CommHook = ExactCommHook(group, layout, policy.reduce_dtype, leave_sums=policy.rule_reduces)
    for holds, wrap in _AROUND:
        if holds(bucket):
            comm_hook = wrap(comm_hook, bucket)
    return comm_hook
