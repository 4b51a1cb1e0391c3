"""Fused attention kernels for GPUs (csrc/attention): forward, and backward from the log-sum-exp.

They hold one tile of scores at a time (Dao et al. 2022), skip tiles of keys that no query may see, and
compute dropout's mask on the fly, equal to `dropout_mask_attention`. Sums have a fixed order: no atomics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megazero.kernels.library import Argument, KernelLibrary
from megazero.ops.attention.call import AttentionCall
from megazero.ops.attention.kernel import AttentionKernel, Results, strides
from megazero.ops.attention.pattern import CAUSAL
from megazero.ops.counter_random import keep_threshold
from megazero.ops.cuda import STILL_KERNELS, cuda_kernels
from megazero.ops.dropout import AttentionDropout
from megazero.ops.example import Example, Traffic
from megazero.ops.positions import Positions

MOST_SIZE = 128  # channels of a head
_MOST_BLOCKS = 65535  # of CUDA's second and third dimension
_NO_LIMIT = 1 << 30
_PROCESSORS = (
    132  # of an H100; the same number everywhere, so that plans and results do not depend on the device
)
_ROWS = 128  # of a block of keys, times the bytes of an element: 64 rows in 16 bits, 32 in fp32
_PACK = 16  # bytes that cross the bus together


def _readable(x: Tensor) -> Tensor:
    """x [rows, samples, heads, size] with contiguous, aligned channels, copied if need be."""
    steps = (x.data_ptr() // x.element_size(), *(x.stride(dim) for dim in range(3) if x.shape[dim] > 1))
    pack = _PACK // x.element_size()
    if x.stride(3) == 1 and not any(step % pack for step in steps):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _span(x: Tensor) -> Tensor:
    """The memory from x's first element to its last as one contiguous row, which is passed to a launch."""
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.as_strided((last + 1,), (1,))


def _places(positions: Positions) -> tuple[Tensor | None, list[int]]:
    """Positions as kernels read them: a tensor or None; start, step, strides of rows and samples."""
    if isinstance(positions, range):
        return None, [positions.start, positions.step, 0, 0]
    wide = positions.contiguous()
    return wide, [0, 0, wide.stride(0), 1 if wide.dim() == 2 else 0]


@dataclass(frozen=True)
class _Given:
    """A call as the kernels get it.

    Attributes:
        sides, others: what `Numbers` of csrc/attention/cuda.cu has between sizes and strides, and after them.
        scale, kept: the factors of scores, and of what dropout keeps.
        tensors: bounds of documents, mask, keys of dropout, positions of queries and keys; or None.
    """

    sides: tuple[int, ...]
    others: tuple[int, ...]
    scale: float
    kept: float
    tensors: tuple[Tensor | None, ...]

    @classmethod
    def of(cls, call: AttentionCall) -> _Given:
        first, stop = (None, None) if call.documents is None else call.documents.bounds
        mask, of_mask = None, [0, 0, 0, 0]
        if call.mask is not None:
            mask = call.mask.view((1,) * (4 - call.mask.dim()) + call.mask.shape).contiguous()
            of_mask, mask = strides(mask, 4), mask.view(torch.uint8)
        keys, kept, drops = None, 1.0, [0, 0, 0]
        nowhere: tuple[Tensor | None, list[int]] = (None, [0, 0, 0, 0])
        places = nowhere, nowhere
        if call.dropout is not None:
            keys, drops, places = _drops(call.dropout)
            kept = 1 / (1 - call.dropout.p)
        sides = tuple(_NO_LIMIT if side < 0 else side for side in call.sides)
        others = (*of_mask, *drops, *places[0][1], *places[1][1])
        tensors = (first, stop, mask, keys, places[0][0], places[1][0])
        return cls(sides, others, call.scale, kept, tensors)

    def arguments(
        self, q: Tensor, k: Tensor, v: Tensor, results: Tensor, of_keys: Tensor | None = None
    ) -> tuple[Argument, ...]:
        """The arguments before the results, of which one of queries and one of keys is given here."""
        (s, b, n, d), (t, _, g, _) = q.shape, k.shape
        shares = 1 if of_keys is None else of_keys.shape[2] // g
        wide = (results.dtype != q.dtype) + 2 * (of_keys is not None and of_keys.dtype != q.dtype)
        if max(b, n) > _MOST_BLOCKS:
            raise ValueError(
                f"`q` must have at most {_MOST_BLOCKS:,} samples and heads, but has {b:,} and {n:,}; "
                "use smaller micro-batches"
            )
        distances = [stride for x in (q, k, v) for stride in strides(x, 3)]
        numbers = (s, t, b, n, g, d, *self.sides, shares, wide, *distances, *self.others)
        return (q.dtype, numbers, self.scale, *map(_span, (q, k, v)), *self.tensors, self.kept)


def _drops(
    dropout: AttentionDropout,
) -> tuple[Tensor, list[int], tuple[tuple[Tensor | None, list[int]], tuple[Tensor | None, list[int]]]]:
    """Keys, their numbers among `Numbers`, and the positions of queries and of keys."""
    keys = dropout.keys.contiguous()
    numbers = [keys.stride(0) if keys.dim() == 2 else 0, dropout.head_offset, keep_threshold(dropout.p)]
    return keys, numbers, (_places(dropout.query_positions), _places(dropout.key_positions))


@dataclass(frozen=True)
class _Cuda(AttentionKernel):
    """Attention by the kernels of this process, or, in tests, of a library that runs on the host."""

    kernels: KernelLibrary | None = None

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        call: AttentionCall,
        kernels: KernelLibrary | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The result and the log-sum-exp; by other `kernels` if they are given."""
        own = self if kernels is None else replace(self, kernels=kernels)
        return AttentionKernel.__call__(own, q, k, v, call)

    def prepare(self, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> _Given:
        return _Given.of(call)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, given: _Given, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        (s, b, n, _), e = q.shape, v.shape[3]
        if q.numel() == 0 or k.numel() == 0:
            lse = q.new_full((b, n, s), -torch.inf, dtype=torch.float32)
            return torch.zeros(s, b, n, e, dtype=dtype, device=q.device), lse
        q, k, v = _fit(q, k, v)
        out = torch.empty(s, b, n, v.shape[3], dtype=dtype, device=q.device)
        lse = torch.empty(b, n, s, dtype=torch.float32, device=q.device)
        self._launch("attention_forward", *given.arguments(q, k, v, out), out, lse)
        return out[..., :e].contiguous(), lse

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, results: Results, given: _Given, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor]:
        widths = [x.shape[3] for x in (q, k, v)]
        if q.numel() == 0 or k.numel() == 0:
            grad_q, grad_k, grad_v = (torch.zeros(x.shape, dtype=dtype, device=q.device) for x in (q, k, v))
            return grad_q, grad_k, grad_v
        q, k, v = _fit(q, k, v)
        out, grad = _fit(results.out.contiguous(), results.grad.contiguous())
        lse, grad_lse = (None if x is None else x.contiguous() for x in (results.lse, results.grad_lse))
        rows = (out, grad, lse, grad_lse, torch.empty_like(results.lse))
        grad_q = torch.empty(q.shape, dtype=dtype, device=q.device)
        t, b, g, _ = k.shape
        shares = _shares(q, k)
        of_keys = torch.float32 if shares > 1 else dtype
        of_share = [torch.empty(t, b, g * shares, x.shape[3], dtype=of_keys, device=q.device) for x in (k, v)]
        self._launch(
            "attention_backward", *given.arguments(q, k, v, grad_q, of_share[0]), *rows, grad_q, *of_share
        )
        if shares > 1:
            of_share = [x.view(t, b, g, shares, -1).sum(3).to(dtype) for x in of_share]
        grad_q, grad_k, grad_v = (x[..., :own] for x, own in zip((grad_q, *of_share), widths, strict=True))
        return grad_q, grad_k, grad_v

    def _launch(self, name: str, *arguments: Argument) -> None:
        (self.kernels or cuda_kernels()).launch(name, *arguments)


def _shares(q: Tensor, k: Tensor) -> int:
    """The number of blocks among which a group's heads are divided for gradients of keys, to use all SMs."""
    (_, b, n, _), (t, _, g, _) = q.shape, k.shape
    blocks = -(-t * q.element_size() // _ROWS) * b * g
    divisors = (number for number in range(1, n // g + 1) if n // g % number == 0)
    return next((number for number in divisors if blocks * number >= _PROCESSORS), n // g)


def _fit(*tensors: Tensor) -> list[Tensor]:
    """The tensors in a layout that the kernels read, with channels of zeros up to a multiple of 8.

    Zero channels change no score, and the zeros in results are cut off.
    """
    missing = -tensors[0].shape[3] % 8
    return [_readable(F.pad(x, (0, missing)) if missing else x) for x in tensors]


attention_cuda = _Cuda()
"""Attention and its log-sum-exp on a GPU, for heads of up to 128 channels in fp32, fp16 or bf16."""

attention_planned = _Cuda(STILL_KERNELS)
"""The same on the meta device: it makes what the kernels make, and launches nothing."""


class _CudaByMask(_Cuda):
    """Attention by the same kernels, for restrictions that they only support as a mask of all pairs."""

    def prepare(self, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> _Given:
        return _Given.of(call.masked(q, k))


attention_cuda_by_mask = _CudaByMask()


def attention_examples() -> Iterator[Example]:
    """One whose kernels have a tile for each block, so that each byte moves once."""
    s, b, n, d = 64, 2, 2, 64
    rows, elements = s * b * n, s * b * n * d
    dropout = AttentionDropout(0.1, torch.arange(b), range(s), range(s))

    def call(f: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        own = replace(dropout, keys=dropout.keys.to(q.device))
        out: Tensor = f(q, k, v, AttentionCall(0.125, dropout=own, pattern=CAUSAL))[0]
        return out

    def moves(dtype: torch.dtype) -> dict[str, int]:
        tensors = {
            "forward": (4, 1),
            "backward_queries": (6, 2),
            "backward_keys": (6, 2),
        }  # of elements, of rows
        return {
            f"attention_{name}": wide * elements * dtype.itemsize + 4 * narrow * rows
            for name, (wide, narrow) in tensors.items()
        }

    traffic = Traffic(moves, dtypes={"bf16": torch.bfloat16})
    yield Example("attention causal dropout", ((s, b, n, d),) * 3, call, traffic=traffic)
