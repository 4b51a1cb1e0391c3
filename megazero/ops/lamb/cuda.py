"""LAMB's two passes by the kernels of csrc/lamb/cuda.cu, over lists of pieces and over one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megazero.kernels import KernelLibrary
from megazero.ops.cuda import cuda_kernels
from megazero.ops.segments import NO_SIGNALS, DeviceSignals, lengths_of, readable

_CHUNK = 1 << 14  # elements per partial sum; a multiple of 4


@torch.no_grad()
def lamb_norms_of_pieces(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    *,
    beta1: float,
    beta2: float,
    factor: float,
    eps: float,
    weight_decay: float,
    scale: float = 1.0,
    signals: DeviceSignals = NO_SIGNALS,
    kernels: KernelLibrary | None = None,
) -> Tensor:
    """Move the moments of all pieces by their gradients, and measure weights and updates.

    Args:
        params: contiguous fp32 weights of the pieces, at least one.
        grads: their gradients, all of one dtype.
        exp_avgs, exp_avg_sqs: their fp32 moments, changed in place.
        beta1, beta2, factor, eps, weight_decay, scale: as in `lamb_norms`.
        signals: what else the step depends on; with an overflow, moments stay and all norms are 0.
        kernels: the library; None for that of this process.

    Returns:
        The L2 norms of each piece's weights and update, fp64 [pieces, 2] on their device.
    """
    grads = [readable(grad) for grad in grads]
    assert len({grad.dtype for grad in grads}) == 1, "gradients have one dtype"
    lengths = lengths_of(params, grads, exp_avgs, exp_avg_sqs)
    partials = params[0].new_empty(2 * sum(n // _CHUNK + 2 for n in lengths), dtype=torch.float64)
    sums = params[0].new_empty(len(lengths), 2, dtype=torch.float64)
    lists = (params, grads, [None] * len(lengths), exp_avgs, exp_avg_sqs)
    (kernels or cuda_kernels()).launch(
        "lamb_norms",
        grads[0].dtype,
        len(lengths),
        _CHUNK,
        lengths,
        *lists,
        scale,
        signals.scale,
        signals.overflow,
        beta1,
        beta2,
        factor,
        eps,
        weight_decay,
        partials,
        sums,
    )
    return sums.sqrt_()


@torch.no_grad()
def lamb_move_pieces(
    params: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    rates: Sequence[Tensor],
    weights: Sequence[Tensor | None] | None = None,
    *,
    factor: float,
    eps: float,
    weight_decay: float,
    signals: DeviceSignals = NO_SIGNALS,
    kernels: KernelLibrary | None = None,
) -> None:
    """Move the weights of all pieces by ``-rate u``.

    Args:
        params, exp_avgs, exp_avg_sqs: as `lamb_norms_of_pieces` left them.
        rates: for each piece an fp32 scalar on its device.
        weights: for each piece, where the new weights go, rounded (all of one dtype), or None.
        factor, eps, weight_decay: as in `lamb_norms`.
        signals: what else the step depends on: with an overflow, nothing changes.
        kernels: the library; None for that of this process.
    """
    outs = [None] * len(params) if weights is None else weights
    dtypes = {out.dtype for out in outs if out is not None}
    assert len(dtypes) <= 1, "weights have one dtype"
    lengths = lengths_of(params, outs, exp_avgs, exp_avg_sqs)
    lists = (params, list(rates), outs, exp_avgs, exp_avg_sqs)
    settings = (signals.overflow, factor, eps, weight_decay)
    (kernels or cuda_kernels()).launch(
        "lamb_move", dtypes.pop() if dtypes else -1, len(lengths), lengths, *lists, *settings
    )


def lamb_norms_cuda(
    param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, **settings: Any
) -> Tensor:
    """`lamb_norms_of_pieces` for one piece."""
    return lamb_norms_of_pieces([param], [grad], [exp_avg], [exp_avg_sq], **settings).view(2)


def lamb_move_cuda(
    param: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    rate: Tensor,
    weights: Tensor | None = None,
    **settings: Any,
) -> None:
    """`lamb_move_pieces` for one piece."""
    lamb_move_pieces([param], [exp_avg], [exp_avg_sq], [rate], [weights], **settings)
