"""The mean over the replicas, sent as one bit per element, with feedback of the error."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megazero.optim.compressed.signs import pack_signs, unpack_signs
from megazero.optim.grad_norm import local_square_sum
from megazero.optim.rule import Replicas


@torch.no_grad()
def compressed_mean(numbers: Tensor, live: Tensor, replicas: Replicas, units: Tensor | None = None) -> None:
    """Replace `numbers` by an approximate mean over the replicas, with the same bits on all of them.

    Error-compensated 1-bit all-reduce (Seide et al. 2014; Tang et al. 2021, algorithm 1). A number becomes
    its sign times a scale, the root mean square of its whole parameter. Each replica, as a worker, sends
    signs to their owners, and as the owner of a slice it sends the signs of the mean to all. Both keep what
    their signs left out, and add it the next time, so that nothing is lost for good:

    1. ``x = numbers + e_w``; ``e_w = x - C(x)``; C(x) goes to the owners.
    2. An owner makes ``y = mean C(x) + e_s`` of its slice; ``e_s = y - C(y)``; C(y) goes to all.

    Here a scale is taken over a whole parameter, however it is sliced, and however buckets are cut, so that
    layouts with as many replicas and the same micro-batch give the same numbers. (DeepSpeed's owners have a
    scale for each slice.)
    With one replica both compressions still happen.

    With `units`, C(x) is the sign times the element's unit and the parameter's scale, the root mean square of
    ``x / units``. Errors stay in the units of `numbers`.

    The payloads are n / 8 bytes each way, 4 bytes per parameter and replica, and 16 per parameter.

    Args:
        numbers: this replica's own, fp32 [padded] of a bucket.
        live: bool [padded], the same on all replicas: elsewhere, numbers and errors are 0, stay 0, and do not
            count in a scale. False in the padding.
        units: fp32 [padded], above 0, the same on all replicas; None for 1 everywhere.
        replicas: the group, and this bucket's errors.
    """
    group, worker, server = replicas.group, replicas.worker_error, replicas.server_error
    size = server.numel()
    own = slice(group.rank * size, (group.rank + 1) * size)

    live = live.to(numbers.dtype)
    worker.add_(numbers).mul_(live)
    counts = _measured(replicas.spans, worker if units is None else worker / units, live)
    replicas.over_slices(counts, "sum")
    scales = _scales(counts)
    everyones = scales.new_empty(group.size, scales.numel())
    gathering = group.all_gather(everyones.view(-1), scales, async_op=True)
    sent = pack_signs(worker.view(group.size, size))
    received = torch.empty_like(sent)
    sending = group.all_to_all(received.view(-1), sent.view(-1), async_op=True)
    worker.sub_(_signed(worker >= 0, scales, replicas.spans, units)).mul_(live)

    gathering.wait()
    sending.wait()
    mine, own_units = live[own], None if units is None else units[own]
    for theirs, bits in zip(everyones / group.size, unpack_signs(received, size), strict=True):
        server.add_(_signed(bits, theirs, replicas.spans, own_units, own.start))
    server.mul_(mine)
    measured = _measured(replicas.spans, server if own_units is None else server / own_units, mine, own.start)
    group.all_reduce(measured).wait()
    replicas.over_slices(measured, "sum")
    scales = _scales(measured)
    answer = pack_signs(server.view(1, size))
    answers = answer.new_empty(group.size * answer.numel())
    answering = group.all_gather(answers, answer.view(-1), async_op=True)
    server.sub_(_signed(server >= 0, scales, replicas.spans, own_units, own.start)).mul_(mine)

    answering.wait()
    signs = unpack_signs(answers.view(group.size, -1), size).view(-1)
    torch.mul(_signed(signs, scales, replicas.spans, units), live, out=numbers)


def _measured(spans: Sequence[tuple[int, int]], part: Tensor, live: Tensor, first: int = 0) -> Tensor:
    """Each parameter's sum of squares, and how many of its elements are live: fp64 [parameters, 2].

    Args:
        spans: where each parameter lies in the bucket.
        part: the bucket's elements from `first` on; 0 where not live.
        live: the same elements' part of `compressed_mean`'s `live`.
        first: the first element of the part.
    """
    measured = part.new_zeros(len(spans), 2, dtype=torch.float64)
    for row, (start, stop) in zip(measured, spans, strict=True):
        where = slice(max(start - first, 0), max(stop - first, 0))
        row[0], row[1] = local_square_sum([part[where]], part.device), live[where].sum()
    return measured


def _scales(measured: Tensor) -> Tensor:
    """Root mean squares, fp32 [parameters]; 0 for a parameter without live elements."""
    squares, counts = measured.unbind(1)
    return (squares / counts.clamp(min=1.0)).sqrt().float()


def _signed(
    positive: Tensor,
    scales: Tensor,
    spans: Sequence[tuple[int, int]],
    units: Tensor | None,
    first: int = 0,
) -> Tensor:
    """Plus or minus its parameter's scale, in `units`, for a bucket's elements from `first` on; 0 in the
    padding.
    """
    signed = torch.zeros_like(positive, dtype=scales.dtype)
    for scale, (start, stop) in zip(scales, spans, strict=True):
        where = slice(max(start - first, 0), max(stop - first, 0))
        # Exact, and several times as fast on a CPU as choosing between two numbers.
        signed[where].copy_(positive[where]).mul_(2.0 * scale).sub_(scale)
    return signed if units is None else signed.mul_(units)
