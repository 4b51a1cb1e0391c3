"""`build_store`: turns units into a store of buckets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from megazero.mpu.context import ParallelContext
from megazero.mpu.grid import Place
from megazero.mpu.param_spec import spec_of
from megazero.zero.bucket import Bucket, Fill
from megazero.zero.comm_hooks.choose import choose_comm_hook
from megazero.zero.layout import BucketLayout
from megazero.zero.plan import BucketMember, ParameterUse, plan_buckets
from megazero.zero.policy import ZeroPolicy
from megazero.zero.store.device import DeviceStore
from megazero.zero.store.store import Store
from megazero.zero.table import STAGES
from megazero.zero.unit import Unit


def build_store(
    units: Sequence[Unit],
    policy: ZeroPolicy,
    context: ParallelContext,
    fill: Fill | None = None,
    groups: Mapping[int, int] | None = None,
    kind: Callable[[ZeroPolicy], Store] = DeviceStore,
    multiple: int = 1,
) -> Store:
    """Move the parameters of `units` into buckets, in the order in which backward completes them.

    Parameters on the meta device get memory and values one bucket at a time, so where weights are sharded
    the whole model is never on one rank.

    Args:
        units: the units in the order in which forward uses them.
        policy: what is sharded.
        context: the process groups and this rank's device.
        fill: called with each bucket's parameters, writes their initial values; needed for meta parameters.
        groups: parameter groups by ``id`` of the parameter; parameters that it leaves out are in group 0.
        kind: makes the store.
        multiple: each rank's slice of a bucket has a multiple of so many elements.

    Returns:
        The store, with its buckets in that order.

    Raises:
        ConfigError: parameters are on the meta device, the context's device is real, and `fill` is None.
    """
    store = kind(policy)
    params, members = _members(units, groups or {}, context.place)
    for key, numbers in plan_buckets(members, policy, lambda name: context.groups[name].size):
        group = context.groups[key.replicas]
        mine = tuple(members[i] for i in numbers)
        layout = BucketLayout(STAGES[key.row], mine, group.size, group.rank, context.place, multiple)
        comm_hook = choose_comm_hook(key, layout, policy, context)
        Bucket(key, [params[i] for i in numbers], layout, comm_hook, store, context.device, fill)
    return store


def aligned_multiple(device: torch.device) -> int:
    """The elements of which slices are to be multiples on a device.

    On a GPU each rank's slice then begins where vector loads and NCCL's fast protocols want it, whatever the
    sizes of parameters: at a multiple of 256 bytes even in the narrowest dtype. A CPU gains nothing by it.
    """
    return 128 if device.type == "cuda" else 1


def _members(
    units: Sequence[Unit], groups: Mapping[int, int], place: Place
) -> tuple[list[nn.Parameter], list[BucketMember]]:
    """Each parameter once, in the order of its first use."""
    first_use: dict[int, tuple[int, nn.Parameter]] = {}
    for u, unit in enumerate(units):
        for param in unit.params:
            first_use.setdefault(id(param), (u, param))
    uses = Counter(id(param) for unit in units for param in set(unit.params))
    members = [
        BucketMember(
            spec=spec_of(param),
            shape=tuple(param.shape),
            dtype=param.dtype,
            use=ParameterUse(
                chunk=units[u].chunk,
                unit=u,
                alone=uses[id(param)] > 1 or spec_of(param).shared or spec_of(param).tied_with is not None,
            ),
            trainable=param.requires_grad,
            group=groups.get(id(param), 0),
        )
        for u, param in first_use.values()
    ]
    return [param for _, param in first_use.values()], _in_order(members, place)


def _in_order(members: Sequence[BucketMember], place: Place) -> list[BucketMember]:
    """Number the members in the order of the model: by chunk, then by first use.

    Ranks along ``ep`` hold different experts but equally many, so the numbers agree across them.
    """
    ordered, shared = [], 0
    for number, member in enumerate(members):
        order: tuple[int, ...]
        if member.spec.expert:
            order = (member.use.chunk, shared, 0, place.index("ep"), number)
        else:
            order = (member.use.chunk, shared, 1)
            shared += 1
        ordered.append(replace(member, order=order))
    return ordered
