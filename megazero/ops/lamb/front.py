"""The public passes of LAMB and their tables of implementations.

A step has two, with a sum over ranks between them. The update is computed in both: to keep it would take as
much memory as a moment. The norms are those of whole parameters, so a model has a piece for each, most of
them small: the kernels for GPUs take many in one launch (`lamb_norms_of_all`, `lamb_move_all`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from megazero.ops.chunks import scaled, side_by_side
from megazero.ops.cuda import on_cuda_kernels
from megazero.ops.dispatch import CPU, CUDA, CallFacts, Implementation, Operator, where
from megazero.ops.lamb.cuda import (
    lamb_move_cuda,
    lamb_move_pieces,
    lamb_norms_cuda,
    lamb_norms_of_pieces,
)
from megazero.ops.lamb.reference import lamb_move_reference, lamb_norms_reference, lamb_update
from megazero.ops.native import NATIVE, address, available, update_pass

_NATIVE_BLOCK = 1 << 14  # elements per partial sum: as many as a second thread is worth


def lamb_norms_native_cpu(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    beta1: float,
    beta2: float,
    factor: float,
    eps: float,
    weight_decay: float,
    scale: float = 1.0,
) -> Tensor:
    """The compiled kernel of csrc/lamb: one pass over memory, no temporaries."""
    sums = param.new_zeros(-(-param.numel() // _NATIVE_BLOCK), 2, dtype=torch.float64)
    NATIVE.lamb_norms(
        update_pass(param, grad, scale, None),
        *map(address, (param, exp_avg, exp_avg_sq, sums)),
        _NATIVE_BLOCK,
        beta1,
        beta2,
        factor,
        eps,
        weight_decay,
    )
    return sums.sum(0).sqrt_()


def lamb_move_native_cpu(
    param: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    rate: Tensor,
    weights: Tensor | None = None,
    *,
    factor: float,
    eps: float,
    weight_decay: float,
) -> None:
    """The compiled kernel of csrc/lamb."""
    passed, addresses = update_pass(param, None, 1.0, weights), map(address, (param, exp_avg, exp_avg_sq))
    NATIVE.lamb_move(passed, *addresses, float(rate), factor, eps, weight_decay)


@torch.no_grad()
def lamb_norms_blocks(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    beta1: float,
    beta2: float,
    factor: float,
    eps: float,
    weight_decay: float,
    scale: float = 1.0,
) -> Tensor:
    """The reference block by block, so that temporaries stay small; a GPU sums a block as a tree."""
    squares = torch.zeros(2, dtype=torch.float64, device=param.device)
    for p, g, m, v in side_by_side(param, grad, exp_avg, exp_avg_sq):
        g = scaled(g, scale, p.dtype)
        m.lerp_(g, 1.0 - beta1)
        v.mul_(beta2).addcmul_(g, g, value=1.0 - beta2)
        update = lamb_update(p, m, v, factor=factor, eps=eps, weight_decay=weight_decay)
        norms = [torch.linalg.vector_norm(x, dtype=torch.float32) for x in (p, update)]
        squares += torch.stack(norms).double().square_()
    return squares.sqrt_()


@torch.no_grad()
def lamb_move_blocks(
    param: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    rate: Tensor,
    weights: Tensor | None = None,
    *,
    factor: float,
    eps: float,
    weight_decay: float,
) -> None:
    """The reference block by block."""
    for p, m, v, out in side_by_side(param, exp_avg, exp_avg_sq, weights):
        lamb_move_reference(p, m, v, rate, out, factor=factor, eps=eps, weight_decay=weight_decay)


_FP32 = frozenset({torch.float32})

LAMB_NORMS: Operator[Callable[..., Tensor]] = Operator(
    "lamb_norms",
    (
        Implementation("native_cpu", lamb_norms_native_cpu, where(CPU, _FP32, available)),
        Implementation("cuda", lamb_norms_cuda, on_cuda_kernels(_FP32), of_lists=lamb_norms_of_pieces),
        Implementation("blocks", lamb_norms_blocks, where(CUDA, _FP32)),
        Implementation("reference", lamb_norms_reference),
    ),
)

LAMB_MOVE: Operator[Callable[..., None]] = Operator(
    "lamb_move",
    (
        Implementation("native_cpu", lamb_move_native_cpu, where(CPU, _FP32, available)),
        Implementation("cuda", lamb_move_cuda, on_cuda_kernels(_FP32), of_lists=lamb_move_pieces),
        Implementation("blocks", lamb_move_blocks, where(CUDA, _FP32)),
        Implementation("reference", lamb_move_reference),
    ),
)


def lamb_norms(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    beta1: float,
    beta2: float,
    factor: float,
    eps: float,
    weight_decay: float,
    scale: float = 1.0,
) -> Tensor:
    """Move both moments by a gradient, and measure the weights and their update (You et al. 2020).

    The update is ``u = factor m / (sqrt(v) + eps) + weight_decay p``.

    Args:
        param: contiguous weights; all tensors but the gradient have one shape, dtype and device.
        grad: their gradient, of any width.
        exp_avg: the first moment m, changed in place.
        exp_avg_sq: the second moment v, changed in place.
        beta1: decay of m.
        beta2: decay of v.
        factor: what the quotient is multiplied by.
        eps: added to the root.
        weight_decay: share of the weights in the update.
        scale: what the gradient is multiplied by first.

    Returns:
        The L2 norms of weights and update, fp64 [2] on their device.
    """
    return LAMB_NORMS.choose(CallFacts.of(param)).fn(
        param,
        grad,
        exp_avg,
        exp_avg_sq,
        beta1=beta1,
        beta2=beta2,
        factor=factor,
        eps=eps,
        weight_decay=weight_decay,
        scale=scale,
    )


def lamb_move(
    param: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    rate: Tensor,
    weights: Tensor | None = None,
    *,
    factor: float,
    eps: float,
    weight_decay: float,
) -> None:
    """Move weights in place by ``-rate u``, with the update u of `lamb_norms`.

    Args:
        param: as in `lamb_norms`.
        exp_avg: as `lamb_norms` left it.
        exp_avg_sq: as `lamb_norms` left it.
        rate: learning rate times trust ratio, a scalar of the weights' dtype on their device.
        weights: where the new weights also go, rounded to its dtype; None for nowhere.
        factor: as in `lamb_norms`.
        eps: as in `lamb_norms`.
        weight_decay: as in `lamb_norms`.
    """
    LAMB_MOVE.choose(CallFacts.of(param)).fn(
        param, exp_avg, exp_avg_sq, rate, weights, factor=factor, eps=eps, weight_decay=weight_decay
    )


def lamb_norms_of_all(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    *,
    weight_decays: Sequence[float],
    **settings: float,
) -> list[Tensor]:
    """`lamb_norms` of each piece; on a GPU, up to 64 of one weight decay and dtype in one launch.

    Args:
        params, grads, exp_avgs, exp_avg_sqs: for each piece what `lamb_norms` takes.
        weight_decays: for each piece, its weight decay.
        settings: the other arguments of `lamb_norms`, for all pieces.

    Returns:
        For each piece, the L2 norms of weights and update, fp64 [2] on its device.
    """
    lists = (params, grads, exp_avgs, exp_avg_sqs)
    norms: dict[int, Tensor] = {}
    for decay, chosen in _alike(params, grads, weight_decays):
        implementation = LAMB_NORMS.choose(CallFacts.of(params[chosen[0]]))
        terms = {**settings, "weight_decay": decay}
        if implementation.of_lists is None:
            measured = [implementation.fn(*(tensors[i] for tensors in lists), **terms) for i in chosen]
        else:
            measured = implementation.of_lists(*([tensors[i] for i in chosen] for tensors in lists), **terms)
        norms.update(zip(chosen, measured, strict=True))
    return [norms[i] for i in range(len(params))]


def lamb_move_all(
    params: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    rates: Sequence[Tensor],
    weights: Sequence[Tensor | None],
    *,
    weight_decays: Sequence[float],
    **settings: float,
) -> None:
    """`lamb_move` of each piece; on a GPU, up to 64 of one weight decay and dtype in one launch.

    Args:
        params, exp_avgs, exp_avg_sqs, rates, weights: for each piece what `lamb_move` takes.
        weight_decays: for each piece, its weight decay.
        settings: the other arguments of `lamb_move`, for all pieces.
    """
    lists: tuple[Sequence[Tensor | None], ...] = (params, exp_avgs, exp_avg_sqs, rates, weights)
    for decay, chosen in _alike(params, weights, weight_decays):
        implementation = LAMB_MOVE.choose(CallFacts.of(params[chosen[0]]))
        terms = {**settings, "weight_decay": decay}
        if implementation.of_lists is not None:
            implementation.of_lists(*([tensors[i] for i in chosen] for tensors in lists), **terms)
            continue
        for i in chosen:
            implementation.fn(*(tensors[i] for tensors in lists), **terms)


def _alike(
    params: Sequence[Tensor], beside: Iterable[Tensor | None], decays: Iterable[float]
) -> Iterator[tuple[float, list[int]]]:
    """The numbers of the pieces that one call takes, with their decay; most models have two of these.

    Args:
        params: the pieces' weights; one call takes pieces of one device and dtype.
        beside: their gradients or the model's weights, of which a launch takes one dtype.
        decays: their weight decays.
    """
    groups: dict[tuple[float, torch.device, torch.dtype, torch.dtype | None], list[int]] = {}
    for i, (param, other, decay) in enumerate(zip(params, beside, decays, strict=True)):
        key = (decay, param.device, param.dtype, None if other is None else other.dtype)
        groups.setdefault(key, []).append(i)
    for key, chosen in groups.items():
        yield key[0], chosen
