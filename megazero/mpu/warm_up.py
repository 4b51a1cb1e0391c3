"""`warm_up`: the first call of each communicator, at a time when it disturbs nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from megazero.errors import CommunicationError
from megazero.mpu.context import ParallelContext
from megazero.mpu.group import Group
from megazero.mpu.host import read_values
from megazero.mpu.linked_group import LinkedGroup
from megazero.mpu.messages import name_ranks

_MOST_HOSTS = 64  # whose names are looked up for a message, by ranks


def warm_up(context: ParallelContext, host_of: Callable[[int], str | None] = lambda rank: None) -> None:
    """Sum one number over each communicator; every rank calls this.

    NCCL makes a communicator at its first call, in which all members must take part: a batch of messages
    would not do, since not every stage of a pipeline has one for each of them. So a network that does not
    work fails early and by itself. Other algorithms, and pairs of ranks, connect when they are first used.

    Args:
        context: the communicators.
        host_of: the host of a rank, as far as it is known.

    Raises:
        CommunicationError: a communicator could not be used, or gave another sum; names it, its ranks and
            their hosts.
    """
    for group in _communicators(context):
        one = torch.ones(1, device=context.device)
        try:
            group.all_reduce(one).wait()
            total = read_values(one)
        except (RuntimeError, CommunicationError) as error:
            raise CommunicationError(f"{_described(group, host_of)} must connect, but {error}") from error
        if total is not None and total != [group.size]:
            raise CommunicationError(
                f"{_described(group, host_of)} must count {group.size} members, but a sum of ones gave "
                f"{total[0]:g}; look at the network between these hosts"
            )


def _communicators(context: ParallelContext) -> Iterator[Group]:
    """Each communicator of more than one rank once, in an order that is the same on all members.

    The groups for tensors on the host are Gloo's, which connect when they are opened.
    """
    seen: set[int] = set()
    for group in context.groups.values():
        for one in group.groups if isinstance(group, LinkedGroup) else (group,):
            if one.size > 1 and not one.name.startswith("host") and id(one) not in seen:
                seen.add(id(one))
                yield one


def _described(group: Group, host_of: Callable[[int], str | None]) -> str:
    asked = group.ranks[:_MOST_HOSTS]
    hosts = dict.fromkeys(host_of(rank) or "a host that has not said its name" for rank in asked)
    others = " and others" if len(group.ranks) > len(asked) else ""
    return f"the communicator `{group.name}` of {name_ranks(group.ranks)} on {', '.join(hosts)}{others}"
