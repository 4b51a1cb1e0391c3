"""Computes a suspicious step again, to tell faults of data and code from faults of machines.

The same micro-batches must give the same bits, on the same rank and on another rank. If the second pass of a
rank differs from the first, a machine failed once. If a neighbour's pass with its micro-batches differs
from both, one of the two machines computes wrongly. This is the idea of Megatron-LM's rerun state machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

import torch

from megazero.models.batch import MicroBatch
from megazero.mpu.context import ParallelContext
from megazero.mpu.messages import gather_values, name_ranks
from megazero.train.step.engine import Attempt

_SHOWN = 4  # names of tensors in a message


class Cause(Enum):
    """The cause of a suspicious result."""

    REPEATABLE = "repeatable"
    TRANSIENT = "transient"
    PERSISTENT = "persistent"


@dataclass(frozen=True)
class Ruling:
    """The conclusion from repeating a step.

    Attributes:
        cause: the cause.
        ranks: the world ranks at fault, or those among which it is; empty if repeatable.
        text: the conclusion for a person.
    """

    cause: Cause
    ranks: tuple[int, ...]
    text: str


@dataclass(frozen=True)
class PassResults:
    """The results of one rank's passes, as integers: bits of losses, then fingerprints of gradients.

    Attributes:
        names: the name of each number.
        first, again: the results of the first and the second pass with the rank's own micro-batches.
        sums: the loss and the gradient norm over all ranks in these two passes, as hexadecimal text.
        lent: the results of a pass with `neighbour`'s micro-batches; None without such a pass.
        neighbour: the world rank of those micro-batches.
    """

    names: Sequence[str]
    first: Sequence[int]
    again: Sequence[int]
    sums: tuple[Sequence[str], Sequence[str]] = ((), ())
    lent: Sequence[int] | None = None
    neighbour: int | None = None


def rule(passes: Sequence[PassResults]) -> Ruling:
    """Conclude the cause from the passes of all ranks, in rank order."""
    changed = {rank: _unlike(result.first, result.again) for rank, result in enumerate(passes)}
    if ranks := tuple(rank for rank, numbers in changed.items() if numbers):
        what = dict.fromkeys(passes[rank].names[number] for rank in ranks for number in changed[rank])
        shown = ", ".join(list(what)[:_SHOWN]) + (f" and {len(what) - _SHOWN} more" * (len(what) > _SHOWN))
        text = f"{name_ranks(ranks)} computed something else the second time ({shown}): a machine failed once"
        return Ruling(Cause.TRANSIENT, ranks, text)
    if any(before != after for before, after in (result.sums for result in passes)):
        text = (
            "each rank by itself computed the same again, but the sums over the ranks came out differently: "
            "the network or a buffer failed once"
        )
        return Ruling(Cause.TRANSIENT, (), text)
    lent = {
        (rank, result.neighbour): result.lent
        for rank, result in enumerate(passes)
        if result.lent is not None and result.neighbour is not None
    }
    blame = Counter(
        rank for pair, bits in lent.items() if _unlike(bits, passes[pair[1]].again) for rank in pair
    )
    if blame:
        most = max(blame.values())
        ranks = tuple(sorted(rank for rank, count in blame.items() if count == most))
        which = "computes" if len(ranks) == 1 else "compute"
        text = f"{name_ranks(ranks)} {which} something else than other ranks, each time: a machine is faulty"
        return Ruling(Cause.PERSISTENT, ranks, text)
    where = "on the same and on other ranks" if lent else "on the same ranks"
    return Ruling(Cause.REPEATABLE, (), f"it came out the same {where}: the data or the code is the cause")


def repeat(
    first: Attempt,
    replay: Callable[[Sequence[MicroBatch]], Attempt],
    own: Sequence[MicroBatch],
    borrowed: Sequence[MicroBatch] | None,
    context: ParallelContext,
) -> tuple[Attempt, Ruling]:
    """Compute a step again; every rank calls this.

    Args:
        first: the suspicious attempt.
        replay: makes another attempt with these micro-batches.
        borrowed: the next replica's micro-batches; None skips the pass with them.

    Returns:
        The latest attempt, with this rank's own micro-batches, and the conclusion.
    """
    bits, lent, neighbour = _bits(first), None, None
    if borrowed is not None:
        lent = _bits(replay(borrowed))
        data = context.data
        neighbour = data.ranks[(data.rank + 1) % data.size]
    latest = replay(own)
    passes = [_names(latest), bits, _bits(latest), (_sums(first), _sums(latest)), lent, neighbour]
    everyone = gather_values(context.world, passes, context.device)
    return latest, rule([PassResults(*fields) for fields in everyone])


def _names(attempt: Attempt) -> list[str]:
    return [
        *(f"the sum of the {term.label}" for term in attempt.losses.terms),
        *(f"gradients from `{name}` on" for name, _ in attempt.prints),
    ]


def _bits(attempt: Attempt) -> list[int]:
    prints = [fingerprint for _, fingerprint in attempt.prints]
    return [*attempt.local.view(torch.int64).tolist(), *(torch.stack(prints).tolist() if prints else ())]


def _sums(attempt: Attempt) -> list[str]:
    return [attempt.losses.trained_total.hex(), attempt.totals.norm.hex()]


def _unlike(left: Sequence[int], right: Sequence[int]) -> list[int]:
    """The indices at which two lists differ; all indices if their lengths differ."""
    if len(left) != len(right):
        return list(range(max(len(left), len(right))))
    return [i for i, pair in enumerate(zip(left, right, strict=True)) if pair[0] != pair[1]]
