"""residual + dropout(x + bias): the end of every attention and MLP block."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megazero.kernels.library import KernelLibrary
from megazero.ops.autograd import Context, Gradients, apply, once_differentiable
from megazero.ops.chunks import compute_dtype, row_chunks
from megazero.ops.counter_random import KeepRows, keep_columns, keep_multiplier
from megazero.ops.cuda import cuda_kernels, on_cuda_kernels, planned
from megazero.ops.dispatch import TRAINING_FLOATS, CallFacts, Implementation, Operator, kinds_of_calls, where
from megazero.ops.dropout import Dropout, Launched, dropout_mask_hidden, hidden_row_keys
from megazero.ops.example import Example, Traffic, sums_moved
from megazero.ops.included import handed
from megazero.ops.native import NATIVE, address, kept_by, on_native_cpu, rows_of


@dataclass(frozen=True)
class DropoutFacts(CallFacts):
    """The facts that decide which implementation runs.

    Attributes:
        dropout: whether there is dropout.
        mixed: whether the residual has another dtype than x.
    """

    dropout: bool
    mixed: bool


def bias_dropout_add_reference(
    x: Tensor, bias: Tensor | None, residual: Tensor, dropout: Dropout | None
) -> Tensor:
    """residual + mask * (x + bias) / (1 - p), with inverted scaling (Srivastava et al. 2014)."""
    wide = x.to(compute_dtype(x.dtype))
    if bias is not None:
        wide = wide + bias
    if dropout is not None:
        wide = wide * dropout_mask_hidden(dropout, *x.shape) / (1 - dropout.p)
    return (residual + wide).to(residual.dtype)


_NO_DROPOUT: Launched = (None, None, (1, 0, 0, 0, 0, 0, 0), 0, 1.0)


class _Keys(NamedTuple):
    """The dropout of a call; for kernels that do not derive it themselves, also each row's key.

    counters: those with which kernels for GPUs complete their sums; None: nothing is summed.
    """

    dropout: Dropout | None
    rows: Tensor | None = None
    counters: Tensor | None = None

    @property
    def p(self) -> float:
        """The share that is dropped."""
        return 0.0 if self.dropout is None else self.dropout.p

    @property
    def launched(self) -> Launched:
        """The dropout as kernels for GPUs take it."""
        return _NO_DROPOUT if self.dropout is None else self.dropout.launched


class _Shape(NamedTuple):
    """The dtypes of a call's gradients.

    Attributes:
        x: the dtype of x.
        bias: the dtype of the bias, or of the one that x holds already; None without either.
    """

    x: torch.dtype
    bias: torch.dtype | None


@dataclass(frozen=True)
class DropoutKernel:
    """The two passes, each of which makes the mask from the keys of the rows.

    Attributes:
        forward: x, the wide bias or None, the residual and the dropout -> the sum.
        backward: the gradient of the sum, the dropout and the dtypes -> the gradients of x and of the bias.
        counters: x -> the counters for its sums; None: the passes take none.
    """

    forward: Callable[[Tensor, Tensor | None, Tensor, _Keys], Tensor]
    backward: Callable[[Tensor, _Keys, _Shape], tuple[Tensor, Tensor | None]]
    counters: Callable[[Tensor], Tensor] | None = None


class _BiasDropoutAdd(torch.autograd.Function):
    """The operator, which saves only the keys: recomputing the mask costs less than saving and reading it."""

    @staticmethod
    def forward(
        ctx: Context[tuple[Dropout | None, Tensor | None, DropoutKernel, _Shape, bool]],
        x: Tensor,
        bias: Tensor | None,
        residual: Tensor,
        row_keys: Tensor | None,
        dropout: Dropout | None,
        kernel: DropoutKernel,
        included: Tensor | None = None,
    ) -> Tensor:
        owner = bias if included is None else included
        counters = None if owner is None or kernel.counters is None else kernel.counters(x)
        ctx.save_for_backward(row_keys)
        # Not saved: who computes a layer again stops at its last saved tensor, and would come as far as this.
        shape = _Shape(x.dtype, None if owner is None else owner.dtype)
        ctx.kept = dropout, counters, kernel, shape, included is not None
        wide_bias = None if bias is None else bias.to(compute_dtype(x.dtype)).contiguous()
        keys = _Keys(dropout, row_keys, counters)
        return kernel.forward(x.contiguous(), wide_bias, residual.contiguous(), keys)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Context[tuple[Dropout | None, Tensor | None, DropoutKernel, _Shape, bool]], grad: Tensor
    ) -> Gradients:
        dropout, counters, kernel, shape, included = ctx.kept
        keys = _Keys(dropout, ctx.saved_tensors[0], counters)
        grad_x, summed = kernel.backward(grad.contiguous(), keys, shape)
        summed = None if summed is None else summed.to(shape.bias)
        of_bias, of_included = (None, summed) if included else (summed, None)
        return grad_x, of_bias, grad, None, None, None, of_included


def _row_keys(dropout: Dropout) -> Tensor:
    """int64 [s b, 1]."""
    return hidden_row_keys(dropout).view(-1, 1)


def _keep_hash(keys: _Keys, width: int) -> tuple[KeepRows, Tensor]:
    assert keys.rows is not None
    columns = torch.arange(width, device=keys.rows.device)
    return KeepRows.of(keys.rows), keep_columns(columns)


def _native_forward(x: Tensor, bias: Tensor | None, residual: Tensor, keys: _Keys) -> Tensor:
    keep_rows, columns = _keep_hash(keys, x.shape[-1])
    out = torch.empty_like(x)
    tensors = map(address, (x, bias, residual, out))
    NATIVE.bias_dropout_add_forward(rows_of(x, x.shape[-1]), kept_by(keep_rows, columns, keys.p), *tensors)
    return out


def _native_backward(grad: Tensor, keys: _Keys, shape: _Shape) -> tuple[Tensor, Tensor | None]:
    width, grad_x = grad.shape[-1], torch.empty_like(grad)
    keep_rows, columns = _keep_hash(keys, width)
    grad_bias = None if shape.bias is None else torch.empty(width, dtype=torch.float32)
    tensors = map(address, (grad, grad_x, grad_bias))
    NATIVE.bias_dropout_add_backward(rows_of(grad, width), kept_by(keep_rows, columns, keys.p), *tensors)
    return grad_x, grad_bias


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


def _chunked_forward(x: Tensor, bias: Tensor | None, residual: Tensor, keys: _Keys) -> Tensor:
    wide_type, x_rows, residual_rows = compute_dtype(x.dtype), _rows(x), _rows(residual)
    keep_rows, columns = _keep_hash(keys, x.shape[-1])
    out = torch.empty_like(residual_rows)
    for chunk in row_chunks(x, *x_rows.shape):
        multiplier = keep_multiplier(keep_rows[chunk], columns, keys.p, 1 / (1 - keys.p)).to(wide_type)
        wide = x_rows[chunk].to(wide_type)
        if bias is not None:
            wide = wide + bias
        out[chunk] = multiplier.mul_(wide).add_(residual_rows[chunk])
    return out.view(residual.shape)


def _chunked_backward(grad: Tensor, keys: _Keys, shape: _Shape) -> tuple[Tensor, Tensor | None]:
    wide_type, grad_rows = compute_dtype(shape.x), _rows(grad)
    keep_rows, columns = _keep_hash(keys, grad.shape[-1])
    grad_x = torch.empty_like(grad_rows, dtype=shape.x)
    grad_bias = None if shape.bias is None else grad.new_zeros(grad.shape[-1], dtype=wide_type)
    for chunk in row_chunks(grad, *grad_rows.shape):
        multiplier = keep_multiplier(keep_rows[chunk], columns, keys.p, 1 / (1 - keys.p)).to(wide_type)
        multiplier.mul_(grad_rows[chunk])
        grad_x[chunk] = multiplier
        if grad_bias is not None:
            grad_bias += multiplier.sum(0)
    return grad_x.view(grad.shape), grad_bias


def _on_gpu(library: KernelLibrary) -> DropoutKernel:
    def rows_and_groups(x: Tensor) -> tuple[int, int, int]:
        width = x.shape[-1]
        count = x.numel() // width if width else 0
        return count, width, library.column_groups(count, width)

    def counters(x: Tensor) -> Tensor:
        _, width, groups = rows_and_groups(x)
        return x.new_empty(library.column_counters(groups, width), dtype=torch.int32)

    def forward(x: Tensor, bias: Tensor | None, residual: Tensor, keys: _Keys) -> Tensor:
        # The kernels know residuals in x's dtype and in fp32.
        known = residual if residual.dtype == x.dtype else residual.float()
        out, sizes = torch.empty_like(known), rows_and_groups(x)
        given = (x.dtype, out.dtype, *sizes, x, bias, known)
        counted = 0 if keys.counters is None else keys.counters.numel()
        library.launch("bias_dropout_add_forward", *given, *keys.launched, out, counted, keys.counters)
        return out.to(residual.dtype)

    def backward(grad: Tensor, keys: _Keys, shape: _Shape) -> tuple[Tensor, Tensor | None]:
        known = grad if grad.dtype == shape.x else grad.float()
        sizes = rows_and_groups(grad)
        _, width, groups = sizes
        # Without dropout and in one dtype the gradient of x is that of the sum.
        grad_x, summed, partials, dtype = None, None, None, torch.float32
        if keys.dropout is not None or grad.dtype != shape.x:
            grad_x = torch.empty_like(known, dtype=shape.x)
        if shape.bias is not None:
            dtype = shape.x if shape.bias == shape.x else dtype
            summed = known.new_empty(width, dtype=dtype)
            partials = known.new_empty(groups, width, dtype=torch.float32)
        if grad_x is not None or summed is not None:
            given, made = (shape.x, known.dtype, *sizes, known), (grad_x, dtype, summed, partials)
            library.launch("bias_dropout_add_backward", *given, *keys.launched, *made, keys.counters)
        return grad if grad_x is None else grad_x, summed

    return DropoutKernel(forward, backward, counters)


_NATIVE = DropoutKernel(_native_forward, _native_backward)
_CHUNKED = DropoutKernel(_chunked_forward, _chunked_backward)


def bias_dropout_add_native_cpu(
    x: Tensor, bias: Tensor | None, residual: Tensor, dropout: Dropout | None
) -> Tensor:
    """residual + dropout(x + bias) for x and residual [s, b, h] of one dtype, fp32 or bf16, on CPU."""
    assert dropout is not None
    return apply(_BiasDropoutAdd, x, bias, residual, _row_keys(dropout), dropout, _NATIVE)


def bias_dropout_add_chunked(
    x: Tensor, bias: Tensor | None, residual: Tensor, dropout: Dropout | None
) -> Tensor:
    """residual + dropout(x + bias), in row chunks that stay in cache; shapes [s, b, h]."""
    assert dropout is not None
    return apply(_BiasDropoutAdd, x, bias, residual, _row_keys(dropout), dropout, _CHUNKED)


def bias_dropout_add_cuda(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    dropout: Dropout | None,
    included: Tensor | None = None,
    kernels: KernelLibrary | None = None,
) -> Tensor:
    """residual + dropout(x + bias) for fp32, fp16 or bf16 x [s, b, h] on a GPU, in the residual's dtype."""
    library = kernels or cuda_kernels()
    passes = library.once("bias_dropout_add", lambda: _on_gpu(library))
    return apply(_BiasDropoutAdd, x, bias, residual, None, dropout, passes, included)


def bias_add_torch(x: Tensor, bias: Tensor | None, residual: Tensor, dropout: Dropout | None) -> Tensor:
    """residual + x + bias by torch's own operators."""
    assert dropout is None
    return residual + (x if bias is None else x + bias)


def _call(shape: tuple[int, int, int], p: float | None) -> Callable[..., Tensor]:
    """A call with or without a bias: of x, bias and residual, or of x and residual."""
    s, b, _ = shape

    def call(f: Callable[..., Tensor], x: Tensor, *rest: Tensor) -> Tensor:
        keys = torch.arange(b, device=x.device) * 7 - 3
        bias, residual = rest if len(rest) == 2 else (None, *rest)
        return f(x, bias, residual, None if p is None else Dropout(p, keys, range(5, 5 + s)))

    return call


def _examples() -> Iterator[Example]:
    for shape in ((3, 2, 5), (1, 1, 1), (211, 3, 129)):
        for p in (0.1, 0.0, 0.9, None):
            own = {"dropout": p is not None, "mixed": False}
            yield Example(f"{shape} {p=}", (shape, shape[-1:], shape), _call(shape, p), own=own)
            yield Example(f"{shape} {p=} no bias", (shape, shape), _call(shape, p), own=own)

    s, b, width = shape = (48, 2, 1024)

    def moves(dtype: torch.dtype) -> dict[str, int]:
        """Three matrices forward, two backward, a key per sequence, the bias and sums of its gradient."""
        matrix, keys, vector = s * b * width * dtype.itemsize, b * 8, width * 4
        return {
            "bias_dropout_add_forward": 3 * matrix + keys + vector,
            "bias_dropout_add_backward": 2 * matrix + keys + sums_moved(width) + width * dtype.itemsize,
        }

    yield Example("bias_dropout_add", (shape, (width,), shape), _call(shape, 0.1), traffic=Traffic(moves))


BIAS_DROPOUT_ADD: Operator[Callable[[Tensor, Tensor | None, Tensor, Dropout | None], Tensor]] = Operator(
    "bias_dropout_add",
    (
        Implementation("cuda", bias_dropout_add_cuda, on_cuda_kernels()),
        planned(bias_dropout_add_cuda),
        Implementation("torch", bias_add_torch, where(dtypes=TRAINING_FLOATS, dropout=False)),
        Implementation("native_cpu", bias_dropout_add_native_cpu, on_native_cpu(dropout=True, mixed=False)),
        # The multiplier 1 / (1 - p) is fp32, so fp64 takes the reference.
        Implementation("chunked", bias_dropout_add_chunked, where(dtypes=TRAINING_FLOATS, dropout=True)),
        Implementation("reference", bias_dropout_add_reference),
    ),
    kinds_of_calls(DropoutFacts, dropout=(False, True), mixed=(False, True)),
    _examples,
)


def bias_dropout_add(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    dropout: Dropout | None,
    included: Tensor | None = None,
) -> Tensor:
    """residual + dropout(x + bias) for x and residual [s, b, h], bias [h] or None.

    The mask is a function of the dropout's keys and absolute positions; see `ops.dropout`. Without dropout
    this is a plain sum. `included` is a bias [h] that x contains already, in place of one to add; backward
    computes its gradient too. Raises ValueError unless there is one key per sequence and one position per
    row.
    """
    if dropout is not None:
        dropout.check(*x.shape[:2])
    facts = DropoutFacts.of(x, dropout=dropout is not None, mixed=residual.dtype != x.dtype)
    row = BIAS_DROPOUT_ADD.choose(facts)
    if included is None:
        return row.fn(x, bias, residual, dropout)
    assert bias is None, "x has one bias, which it holds or which is to be added"
    x, included = handed(row, x, included)
    return row.fn(x, None, residual, dropout, **({} if included is None else {"included": included}))
