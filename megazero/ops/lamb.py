"""The two passes of LAMB (You et al. 2020, algorithm 2) over lists of pieces, in place.

With Adam's moments m and v, the update is ``u = factor m / (sqrt(v) + eps) + decay p``. The first pass moves
the moments and measures p and u; after a sum over ranks, the second one moves p. It computes u once more: to
keep it would take as much memory as a moment. The norms are those of whole parameters, so a model has a piece
for each, most of them small: the kernels for GPUs take many in one launch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import Tensor

from megazero.kernels.library import KernelLibrary
from megazero.ops.chunks import scaled, side_by_side
from megazero.ops.cuda import cuda_kernels, on_cuda_kernels
from megazero.ops.dispatch import CUDA, CallFacts, Implementation, Operator, where
from megazero.ops.example import Example, Traffic
from megazero.ops.native import NATIVE, address, on_native_cpu, update_pass
from megazero.ops.segments import NO_SIGNALS, NO_WEIGHTS, DeviceSignals, lengths_of, readable

_FP32 = frozenset({torch.float32})
_NATIVE_BLOCK = 1 << 14  # elements per partial sum: as many as a second thread is worth
_CHUNK = 1 << 14  # elements per partial sum of the GPU's kernel; a multiple of 4


@dataclass(frozen=True)
class LambTerms:
    """The numbers of both passes.

    Attributes:
        factor: what the quotient of the moments is multiplied by.
        eps: added to the root.
        decay: share of the weights in the update.
    """

    factor: float
    eps: float
    decay: float = 0.0

    @property
    def numbers(self) -> tuple[float, float, float]:
        """The terms as the kernels take them."""
        return (self.factor, self.eps, self.decay)

    def update(self, p: Tensor, m: Tensor, v: Tensor) -> Tensor:
        """``u = factor m / (sqrt(v) + eps) + decay p``."""
        root = v.sqrt().add_(self.eps)
        update = torch.div(m, root, out=root).mul_(self.factor)
        return update.add_(p, alpha=self.decay) if self.decay else update


@dataclass(frozen=True)
class LambMoments:
    """How the first pass moves the moments: their decays, and the factor of the gradients."""

    beta1: float
    beta2: float
    scale: float = 1.0

    def move(self, grad: Tensor, m: Tensor, v: Tensor) -> None:
        """``m = beta1 m + (1 - beta1) g``; ``v = beta2 v + (1 - beta2) g^2``."""
        g = scaled(grad, self.scale, m.dtype)
        m.lerp_(g, 1.0 - self.beta1)
        v.mul_(self.beta2).addcmul_(g, g, value=1.0 - self.beta2)


Tensors = Sequence[Tensor]
Weights = Sequence[Tensor | None]


def norms_native_cpu(
    params: Tensors, grads: Tensors, ms: Tensors, vs: Tensors, moments: LambMoments, terms: LambTerms
) -> list[Tensor]:
    """The compiled kernel of csrc/lamb: one pass over memory, no temporaries."""
    norms = []
    for param, grad, m, v in zip(params, grads, ms, vs, strict=True):
        sums = param.new_zeros(-(-param.numel() // _NATIVE_BLOCK), 2, dtype=torch.float64)
        around, addresses = update_pass(param, grad, moments.scale, None), map(address, (param, m, v, sums))
        NATIVE.lamb_norms(around, *addresses, _NATIVE_BLOCK, moments.beta1, moments.beta2, *terms.numbers)
        norms.append(sums.sum(0).sqrt_())
    return norms


def move_native_cpu(
    params: Tensors, ms: Tensors, vs: Tensors, rates: Tensors, weights: Weights, terms: LambTerms
) -> None:
    """The compiled kernel of csrc/lamb."""
    for param, m, v, rate, out in zip(params, ms, vs, rates, weights, strict=True):
        around, addresses = update_pass(param, None, 1.0, out), map(address, (param, m, v))
        NATIVE.lamb_move(around, *addresses, float(rate), *terms.numbers)


@torch.no_grad()
def norms_cuda(
    params: Tensors,
    grads: Tensors,
    ms: Tensors,
    vs: Tensors,
    moments: LambMoments,
    terms: LambTerms,
    *,
    signals: DeviceSignals = NO_SIGNALS,
    kernels: KernelLibrary | None = None,
) -> Tensor:
    """All pieces in one launch; with an overflow among `signals`, moments stay and all norms are 0.

    Returns:
        The norms, fp64 [pieces, 2].
    """
    grads = [readable(grad) for grad in grads]
    assert len({grad.dtype for grad in grads}) == 1, "gradients have one dtype"
    lengths = lengths_of(params, grads, ms, vs)
    partials = params[0].new_empty(2 * sum(n // _CHUNK + 2 for n in lengths), dtype=torch.float64)
    sums = params[0].new_empty(len(lengths), 2, dtype=torch.float64)
    (kernels or cuda_kernels()).launch(
        "lamb_norms",
        grads[0].dtype,
        len(lengths),
        _CHUNK,
        lengths,
        *(params, grads, [None] * len(lengths), ms, vs),
        *(moments.scale, signals.scale, signals.overflow),
        *(moments.beta1, moments.beta2, *terms.numbers),
        partials,
        sums,
    )
    return sums.sqrt_()


@torch.no_grad()
def move_cuda(
    params: Tensors,
    ms: Tensors,
    vs: Tensors,
    rates: Tensors,
    weights: Weights,
    terms: LambTerms,
    *,
    signals: DeviceSignals = NO_SIGNALS,
    kernels: KernelLibrary | None = None,
) -> None:
    """All pieces in one launch; with an overflow among `signals`, nothing changes."""
    dtypes = {out.dtype for out in weights if out is not None}
    assert len(dtypes) <= 1, "weights have one dtype"
    lengths = lengths_of(params, weights, ms, vs)
    (kernels or cuda_kernels()).launch(
        "lamb_move",
        dtypes.pop() if dtypes else NO_WEIGHTS,
        len(lengths),
        lengths,
        *(params, list(rates), weights, ms, vs),
        *(signals.overflow, *terms.numbers),
    )


@torch.no_grad()
def norms_blocks(
    params: Tensors, grads: Tensors, ms: Tensors, vs: Tensors, moments: LambMoments, terms: LambTerms
) -> list[Tensor]:
    """The reference block by block, so that temporaries stay small; a GPU sums a block as a tree."""
    norms = []
    for pieces in zip(params, grads, ms, vs, strict=True):
        squares = torch.zeros(2, dtype=torch.float64, device=pieces[0].device)
        for p, g, m, v in side_by_side(*pieces):
            moments.move(g, m, v)
            both = (p, terms.update(p, m, v))
            lengths = [torch.linalg.vector_norm(x, dtype=torch.float32) for x in both]
            squares += torch.stack(lengths).double().square_()
        norms.append(squares.sqrt_())
    return norms


@torch.no_grad()
def move_blocks(
    params: Tensors, ms: Tensors, vs: Tensors, rates: Tensors, weights: Weights, terms: LambTerms
) -> None:
    """The reference block by block."""
    for param, m, v, rate, out in zip(params, ms, vs, rates, weights, strict=True):
        for p, first, second, new in side_by_side(param, m, v, out):
            move_reference([p], [first], [second], [rate], [new], terms)


@torch.no_grad()
def norms_reference(
    params: Tensors, grads: Tensors, ms: Tensors, vs: Tensors, moments: LambMoments, terms: LambTerms
) -> list[Tensor]:
    """Move m and v; then sqrt(sum p^2) and sqrt(sum u^2)."""
    norms = []
    for p, g, m, v in zip(params, grads, ms, vs, strict=True):
        moments.move(g, m, v)
        both = (p, terms.update(p, m, v))
        norms.append(torch.stack([x.double().square().sum() for x in both]).sqrt())
    return norms


@torch.no_grad()
def move_reference(
    params: Tensors, ms: Tensors, vs: Tensors, rates: Tensors, weights: Weights, terms: LambTerms
) -> None:
    """``p = p - rate u``."""
    for p, m, v, rate, out in zip(params, ms, vs, rates, weights, strict=True):
        p.sub_(terms.update(p, m, v).mul_(rate))
        if out is not None:
            out.copy_(p)


_SIZES = (*(768, 1003, 250, 2049) * 10, 3 * _CHUNK)
"""The pieces of an example: biases and norms, matrices, and one of several chunks."""
_ELEMENTS = sum(_SIZES)
_TERMS, _BF16 = LambTerms(1.0, 1e-6, 0.1), MappingProxyType({"bf16": torch.bfloat16})


def _cut(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Pieces one behind the other, as in a bucket: most begin within a pack and end within another."""
    return list(torch.rand(_ELEMENTS).to(dtype).split(_SIZES))


def _norms_examples() -> Iterator[Example]:
    # A piece that begins within a pack of 4 starts its first chunk there.
    begins = [sum(_SIZES[:number]) for number in range(len(_SIZES))]
    chunks = sum(-(-(size + begin % 4) // _CHUNK) for size, begin in zip(_SIZES, begins, strict=True))
    # The sums of chunks count only where they are all that a kernel reads.
    moved = {"lamb_moments": (4 + 2 + 2 * 8) * _ELEMENTS, "lamb_sums": 16 * (chunks + len(_SIZES))}

    def call(f: Callable[..., Iterable[Tensor]]) -> None:
        f(_cut(), _cut(torch.bfloat16), _cut(), _cut(), LambMoments(0.9, 0.95), _TERMS)

    yield Example("lamb", (), call, traffic=Traffic(lambda dtype: moved, _BF16))


def _move_examples() -> Iterator[Example]:
    moved = {"lamb_move": (8 + 2 * 4 + 2) * _ELEMENTS + 4 * len(_SIZES)}

    def call(f: Callable[..., None]) -> None:
        rates = torch.full((len(_SIZES),), 1e-3).unbind()
        f(_cut(), _cut(), _cut(), rates, _cut(torch.bfloat16), _TERMS)

    yield Example("lamb", (), call, traffic=Traffic(lambda dtype: moved, _BF16))


LAMB_NORMS: Operator[Callable[..., Iterable[Tensor]]] = Operator(
    "lamb_norms",
    (
        Implementation("native_cpu", norms_native_cpu, on_native_cpu(_FP32)),
        Implementation("cuda", norms_cuda, on_cuda_kernels(_FP32)),
        Implementation("blocks", norms_blocks, where(CUDA, _FP32)),
        Implementation("reference", norms_reference),
    ),
    examples=_norms_examples,
    differentiable=False,
)

LAMB_MOVE: Operator[Callable[..., None]] = Operator(
    "lamb_move",
    (
        Implementation("native_cpu", move_native_cpu, on_native_cpu(_FP32)),
        Implementation("cuda", move_cuda, on_cuda_kernels(_FP32)),
        Implementation("blocks", move_blocks, where(CUDA, _FP32)),
        Implementation("reference", move_reference),
    ),
    examples=_move_examples,
    differentiable=False,
)


def lamb_norms(
    params: Tensors,
    grads: Tensors,
    ms: Tensors,
    vs: Tensors,
    decays: Sequence[float],
    moments: LambMoments,
    terms: LambTerms,
) -> list[Tensor]:
    """Move both moments of each piece by its gradient, and measure its weights and their update.

    Args:
        params: contiguous weights; all tensors of a piece but the gradient have one shape, dtype and device.
        grads: their gradients, of any width.
        ms, vs: the moments, changed in place.
        decays: the weight decay of each piece.
        moments: how the moments move.
        terms: the update's other numbers.

    Returns:
        For each piece, the L2 norms of weights and update, fp64 [2] on its device.
    """
    norms: dict[int, Tensor] = {}
    for decay, chosen in _alike(params, grads, decays):
        lists = ([tensors[i] for i in chosen] for tensors in (params, grads, ms, vs))
        run = LAMB_NORMS.choose(CallFacts.of(params[chosen[0]])).fn
        norms.update(zip(chosen, run(*lists, moments, replace(terms, decay=decay)), strict=True))
    return [norms[i] for i in range(len(params))]


def lamb_move(
    params: Tensors,
    ms: Tensors,
    vs: Tensors,
    rates: Tensors,
    weights: Weights,
    decays: Sequence[float],
    terms: LambTerms,
) -> None:
    """Move the weights of each piece by ``-rate u``, with the update u of `lamb_norms`.

    Args:
        params, decays, terms: as in `lamb_norms`.
        ms, vs: as `lamb_norms` left them.
        rates: for each piece, its learning rate times its trust ratio, a scalar of its weights' dtype and
            device.
        weights: for each piece, where the new weights also go, rounded to its dtype; None for nowhere.
    """
    lists: tuple[Weights, ...] = (params, ms, vs, rates, weights)
    for decay, chosen in _alike(params, weights, decays):
        run = LAMB_MOVE.choose(CallFacts.of(params[chosen[0]])).fn
        run(*([tensors[i] for i in chosen] for tensors in lists), replace(terms, decay=decay))


def _alike(params: Tensors, beside: Weights, decays: Iterable[float]) -> Iterator[tuple[float, list[int]]]:
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
