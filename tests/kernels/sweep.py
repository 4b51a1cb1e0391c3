"""How every differentiable operator's kernels are compared with its reference in fp64, both ways.

A trial is a call with inputs of some rows and width. `TRIALS` makes one for each operator; what is special to
an operator is in a file of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megazero.ops.bias_dropout_add import BIAS_DROPOUT_ADD
from megazero.ops.bias_gelu import BIAS_GELU
from megazero.ops.chosen_rows import CHOSEN_ROWS
from megazero.ops.cross_entropy import CROSS_ENTROPY, OneRank, VocabularySlice
from megazero.ops.dispatch import Operator
from megazero.ops.dropout import Dropout
from megazero.ops.embedding import EMBEDDING
from megazero.ops.gathered_sum import GATHERED_SUM, places
from megazero.ops.layer_norm import ADD_LAYER_NORM, LAYER_NORM
from megazero.ops.permute import PERMUTE
from megazero.ops.rms_norm import ADD_RMS_NORM, RMS_NORM
from megazero.ops.squared_relu import SQUARED_RELU
from megazero.ops.swiglu import SWIGLU
from tests.kernels.harness import EPSILON, WIDTHS, Bound, in_every_order, watched

EPS = 1e-5
FP32 = EPSILON[torch.float32]
# Of rows in the same frame as others, some remainders are enough.
FEW_WIDTHS = (1, 2, 3, 5, 7, 8, 9, 12, 16, 31, 32, 33, 40, 63, 65, 128, 255, 256, 257, 264, 513, 1024, 1025)
FEW_WIDTHS += (2049, 2056)


@dataclass(frozen=True)
class Trial:
    """A call of an operator.

    Attributes:
        call: calls an implementation with the inputs.
        inputs: its float inputs.
        bounds: the dtype, the inputs and the gradients of the results, in fp64 -> a bound for each result and
            gradient.
        exactly: the inputs -> those of the reference, in fp64.
    """

    operator: Operator[Any]
    call: Callable[..., Any]
    inputs: Sequence[Tensor]
    bounds: Callable[[torch.dtype, Sequence[Tensor], Sequence[Tensor]], Sequence[Bound]]
    exactly: Callable[[Sequence[Tensor]], list[Tensor]] = lambda inputs: [each.double() for each in inputs]

    @property
    def kernel(self) -> Callable[..., Any]:
        """The implementation by CUDA kernels."""
        return next(row.fn for row in self.operator.implementations if row.name == "cuda")


def both_ways(fn: Callable[..., Any], inputs: Sequence[Tensor], grads: Sequence[Tensor | None]):
    """The results and the inputs' gradients; of `grads`, one that is None does not arrive."""
    leaves = [each.detach().requires_grad_() for each in inputs]
    results = fn(*leaves)
    results = (results,) if isinstance(results, Tensor) else results
    arriving = [(out, grad) for out, grad in zip(results, grads, strict=True) if grad is not None]
    outs, given = zip(*arriving, strict=True)
    return [
        *(out.detach() for out in results),
        *torch.autograd.grad(outs, leaves, given, materialize_grads=True),
    ]


def by_kernels(trial: Trial, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    def run(kernels):
        return both_ways(partial(trial.call, partial(trial.kernel, kernels=kernels)), trial.inputs, grads)

    return in_every_order(run)


def gradients_for(trial: Trial) -> list[Tensor]:
    """Random gradients of the results."""
    results = trial.call(trial.operator.reference, *trial.inputs)
    results = (results,) if isinstance(results, Tensor) else results
    g = torch.Generator().manual_seed(17)
    return [torch.randn(out.shape, generator=g).to(out.dtype) for out in results]


def check(trial: Trial, grads: Sequence[Tensor | None] | None = None) -> list[Tensor]:
    """The kernels' results and gradients, which are as close to those of fp64 as the trial's bounds."""
    grads = gradients_for(trial) if grads is None else grads
    found = by_kernels(trial, grads)
    wide = trial.exactly(trial.inputs)
    wide_grads = [None if each is None else each.double() for each in grads]
    exact = both_ways(partial(trial.call, trial.operator.reference), wide, wide_grads)
    results = exact[: len(grads)]
    filled = [torch.zeros_like(y) if g is None else g for y, g in zip(results, wide_grads, strict=True)]
    bounds = trial.bounds(trial.inputs[0].dtype, wide, filled)
    for number, (ours, true, bound) in enumerate(zip(found, exact, bounds, strict=True)):
        assert bound.holds(ours, true), number
    return found


def twisted(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The same numbers: by turns with strides of their own, and at an address that allows no packs."""
    kinds = (lambda x: x.transpose(0, -1).contiguous().transpose(0, -1), shifted)
    return [shifted(x) if x.dim() < 2 else kinds[number % 2](x) for number, x in enumerate(tensors)]


def shifted(tensor: Tensor) -> Tensor:
    """The same numbers, one element into their storage: at an address that allows no packs."""
    held = tensor.new_empty(tensor.numel() + 1)
    held[1:] = tensor.flatten()
    return held[1:].view(tensor.shape)


def check_nothing(trial: Trial) -> None:
    """Without elements no kernel runs but those that add up no rows to zeros."""
    library = watched()
    call = partial(trial.call, partial(trial.kernel, kernels=library))
    found = both_ways(call, trial.inputs, gradients_for(trial))
    true = both_ways(partial(trial.call, trial.operator.reference), trial.inputs, gradients_for(trial))
    for ours, theirs in zip(found, true, strict=True):
        assert ours.shape == theirs.shape
        assert torch.equal(ours, theirs)
    sums = ("column_sum", "_backward", "embedding", "clear", "bias_gelu_forward")  # this one clears, too
    assert [name for name in library.report().kernels if not name.endswith(sums)] == []


def rounded_after(units: float, magnitude: Tensor, dtype: torch.dtype) -> Bound:
    """One rounding to dtype of what fp32 computed, `units` of fp32's spacing at `magnitude` off."""
    return Bound(2, magnitude * (units * FP32 / EPSILON[dtype] / 2))


def randn(*shapes: Sequence[int], seed: int = 0) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(tuple(shape), generator=g) for shape in shapes]


def bias_gelu(rows, width, dtype, exact=False, biased=True, scale=2.0) -> Trial:
    x, bias = randn((rows, width), (width,), seed=width)

    def bounds(dtype, inputs, grads):
        z, bias = inputs[0] + (inputs[1] if biased else 0), inputs[1] if biased else torch.zeros(())
        # 1 + erf, and z + bias, round at the size of what they add.
        terms, grad = z.abs() + bias.abs(), grads[0].abs()
        sizes = (terms, 2), (grad * (1 + terms), 4), ((grad * (1 + terms)).sum(0), 4)
        return [rounded_after(units, size, dtype) for size, units in sizes[: 3 if biased else 2]]

    inputs = [(x * scale).to(dtype), bias.to(dtype)][: 2 if biased else 1]
    call = lambda f, x, bias=None, **more: f(x, bias, exact, **more)  # noqa: E731
    return Trial(BIAS_GELU, call, inputs, bounds)


def swiglu(rows, width, dtype, scale=3.0) -> Trial:
    def bounds(dtype, inputs, grads):
        (gate, up), grad = inputs[0].unbind(1), grads[0]
        s = torch.sigmoid(gate)
        for_gate, for_up = (grad * up * s).abs() * (1 + gate.abs()), (grad * gate * s).abs()
        # exp(-gate) overflows below -88, where the result is smaller than this.
        sizes = (gate * s * up).abs() + 1e-28, torch.stack((for_gate, for_up), 1) + 1e-28
        return [rounded_after(6, size, dtype) for size in sizes]

    (x,) = randn((rows, 2, width), seed=width)
    return Trial(SWIGLU, lambda f, x: f(x), [(x * scale).to(dtype)], bounds)


def squared_relu(rows, width, dtype) -> Trial:
    (x,) = randn((rows, width), seed=width)
    return Trial(SQUARED_RELU, lambda f, x: f(x), [x.to(dtype)], lambda *_: [Bound(1)] * 2)


def _call_norm(f, *tensors):
    return f(*tensors, EPS)


def _norm(operator, parameters, bounds):
    def make(rows, width, dtype, offset=0.0) -> Trial:
        added = operator.name.startswith("add_")
        x, *rest = randn((rows, width), *[(rows, width)] * added, *[(width,)] * parameters, seed=width)
        inputs = [(x + offset).to(dtype), *(each.to(dtype) for each in rest[:added]), *rest[added:]]

        def both(dtype, inputs, grads):
            total = inputs[0]
            of_total = grads[1] if added else torch.zeros_like(total)
            y, *others = bounds(dtype, total, inputs[1 + added :], grads[0], of_total)
            return [y, Bound(1), others[0], *others] if added else [y, *others]

        trial = Trial(operator, _call_norm, inputs, both)
        return replace(trial, exactly=_after_the_sum) if added else trial

    return make


def _after_the_sum(inputs):
    """The sum, which is rounded before it is normalized, and a residual of zeros."""
    total = (inputs[0] + inputs[1]).double()
    return [total, torch.zeros_like(total), *(each.double() for each in inputs[2:])]


def _layer_bounds(dtype, total, parameters, grad, grad_total):
    weight, bias = parameters
    mean = total.mean(-1, keepdim=True)
    scale = ((total - mean).square().mean(-1, keepdim=True) + EPS).rsqrt()
    normed, most = (total - mean) * scale, scale * total.abs().amax(-1, keepdim=True)
    offset = 1 + scale * mean.abs()
    size = scale * (grad * weight).abs().amax(-1, keepdim=True) * offset + grad_total.abs()
    return [
        rounded_after(6, most * weight.abs() + bias.abs(), dtype),
        rounded_after(8, size, dtype),
        rounded_after(8, (grad.abs() * (normed.abs() + offset - 1)).sum(0), torch.float32),
        rounded_after(8, grad.abs().sum(0), torch.float32),
    ]


def _rms_bounds(dtype, total, parameters, grad, grad_total):
    scale = (total.square().mean(-1, keepdim=True) + EPS).rsqrt()
    size = (scale * grad * parameters[0]).abs().amax(-1, keepdim=True) + grad_total.abs()
    of_weight = (scale * total * grad).abs().sum(0)
    return [Bound(3), rounded_after(8, size, dtype), Bound(4, of_weight)]


layer_norm = _norm(LAYER_NORM, 2, _layer_bounds)
add_layer_norm = _norm(ADD_LAYER_NORM, 2, _layer_bounds)
rms_norm = _norm(RMS_NORM, 1, _rms_bounds)
add_rms_norm = _norm(ADD_RMS_NORM, 1, _rms_bounds)


def bias_dropout_add(rows, width, dtype, p=0.3, biased=True, wide=False, positions=None) -> Trial:
    shape = (rows, 1, width) if isinstance(rows, int) else (*rows, width)
    s, b, _ = shape
    where = range(5, 5 + s) if positions is None else positions
    dropout = None if p is None else Dropout(p, torch.arange(b) * 7 - 3, where)

    def bounds(dtype, inputs, grads):
        x, residual, share = inputs[0].abs(), inputs[-1].abs(), 1.0 if p is None else 1 / (1 - p)
        terms = x + (inputs[1].abs() if biased else 0)
        tiny = FP32 / EPSILON[torch.float32 if wide else dtype]
        out = Bound(1, 4 * tiny * (terms * share + residual))
        of_bias = [Bound(4, (grads[0].abs() * share).sum((0, 1)))] if biased else []
        return [out, Bound(1), *of_bias, Bound(0)]

    x, bias, residual = randn(shape, (width,), shape, seed=width)
    inputs = [x.to(dtype), *([bias] if biased else []), residual.to(torch.float32 if wide else dtype)]
    call = lambda f, x, *rest: f(x, *((None,) if len(rest) == 1 else ()), *rest, dropout)  # noqa: E731
    return Trial(BIAS_DROPOUT_ADD, call, inputs, bounds)


def cross_entropy(rows, width, dtype, columns=None) -> Trial:
    columns = columns or width
    g = torch.Generator().manual_seed(width)
    target = torch.randint(max(columns, 1), (rows,), generator=g)

    def bounds(dtype, inputs, grads):
        (logits,), (grad,) = inputs, grads
        probs = torch.softmax(logits[:, :columns], -1)
        exact = (probs - torch.nn.functional.one_hot(target, columns)) * grad.unsqueeze(1)
        largest = logits.abs().amax(-1) + 1 if logits.numel() else torch.ones(len(logits))
        # A logit's distance from the normalizer is rounded in proportion to their size.
        tiny = FP32 / EPSILON[dtype]
        floor = 4 * tiny * (exact.abs() * largest.unsqueeze(1) + grad.abs().unsqueeze(1))
        return [Bound(4, largest), Bound(2, torch.nn.functional.pad(floor, (0, width - columns)))]

    (logits,) = randn((rows, width), seed=width)
    call = lambda f, x: f(x, target, VocabularySlice(OneRank(), 0, columns)).loss  # noqa: E731
    return Trial(CROSS_ENTROPY, call, [(3 * logits).to(dtype)], bounds)


# Tokens, their experts and the rows that these made: (n, k, m, choices with a row).
PLACES = ((3, 2, 6, 6), (2, 1, 3, 1), (2, 5, 9, 7), (1, 9, 9, 9))


def _places(rows, width):
    return rows if isinstance(rows, tuple) else PLACES[width % 4] if width < 300 else (1, 2, 3, 2)


def gathered_sum(rows, width, dtype, weighted=True) -> Trial:
    n, k, m, kept = _places(rows, width)
    slots, choice = places(n, k, m, kept, seed=width)

    def bounds(dtype, inputs, grads):
        most = inputs[0].abs().sum()  # of the terms of a sum or a product
        return [Bound(2, most), Bound(1), *[Bound(4, most * grads[0].abs().sum())] * weighted]

    values, weights = randn((m, width), (n, k), seed=width)
    call = lambda f, x, w=None: f(x, slots, choice, w, kept == n * k == m)  # noqa: E731
    return Trial(GATHERED_SUM, call, [values.to(dtype), *[weights] * weighted], bounds)


def permute(rows, width, dtype) -> Trial:
    n, k, m, kept = _places(rows, width)
    slots, choice = places(n, k, m, kept, seed=width)
    (x,) = randn((n, width), seed=width)
    call = lambda f, x: f(x, slots, choice, kept == n * k == m)  # noqa: E731
    return Trial(PERMUTE, call, [x.to(dtype)], lambda d, i, grads: [Bound(0), Bound(2, grads[0].abs().sum())])


def chosen_rows(rows, width, dtype) -> Trial:
    """Of n rows of the source, some go to m places."""
    n, m, taken = rows if isinstance(rows, tuple) else (5, 7, 3) if width < 300 else (1, 2, 1)
    inverse, numbers = (each.view(-1) for each in places(n, 1, m, taken, seed=width))
    inverse = torch.where(inverse == m, -1, inverse)
    source, otherwise = randn((n, width), (m, width), seed=width)
    call = lambda f, x, other: f(x, numbers, inverse, other)  # noqa: E731
    inputs = [source.to(dtype), otherwise.to(dtype)]
    return Trial(CHOSEN_ROWS, call, inputs, lambda *_: [Bound(0)] * 3)


def embedding(rows, width, dtype, tokens=None, first=0, vocab_size=None) -> Trial:
    """A slice of a table of vocab_size rows."""
    rows = rows or 3
    vocab_size = rows if vocab_size is None else vocab_size
    if tokens is None:
        count = 6 if width < 300 else 2
        tokens = torch.randint(vocab_size, (count,), generator=torch.Generator().manual_seed(width))

    def bounds(dtype, inputs, grads):
        sums = both_ways(partial(call, EMBEDDING.reference), inputs, [grads[0].abs()])[1]
        return [Bound(0), Bound(2, sums)]

    call = lambda f, weight: f(tokens, weight, first, vocab_size)  # noqa: E731
    return Trial(EMBEDDING, call, [randn((rows, width), seed=width)[0].to(dtype)], bounds)


TRIALS: dict[str, tuple[Callable[..., Trial], Sequence[int]]] = {
    "add_layer_norm": (add_layer_norm, (1, 24, 33, 1000)),
    "add_rms_norm": (add_rms_norm, (1, 24, 33, 1000)),
    "bias_dropout_add": (bias_dropout_add, WIDTHS),
    "bias_gelu": (bias_gelu, FEW_WIDTHS),
    "bias_gelu exact": (partial(bias_gelu, exact=True), FEW_WIDTHS),
    "chosen_rows": (chosen_rows, WIDTHS),
    "cross_entropy": (cross_entropy, WIDTHS),
    "embedding": (embedding, WIDTHS),
    "gathered_sum": (gathered_sum, WIDTHS),
    "gelu": (partial(bias_gelu, biased=False, scale=20.0), FEW_WIDTHS),
    "gelu exact": (partial(bias_gelu, biased=False, scale=20.0, exact=True), FEW_WIDTHS),
    "layer_norm": (layer_norm, FEW_WIDTHS),
    "permute": (permute, WIDTHS),
    "rms_norm": (rms_norm, WIDTHS),
    "squared_relu": (squared_relu, WIDTHS),
    "swiglu": (swiglu, FEW_WIDTHS),
}


def with_inputs(trial: Trial, *inputs: Tensor) -> Trial:
    """The same call of other numbers."""
    return replace(trial, inputs=inputs)
