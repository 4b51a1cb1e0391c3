"""One step of an optimizer that moves each element by itself, in place over lists of tensors.

The operator knows no optimizer: it is given an `ElementRule`, which has the formula in torch and the
coefficients of the kernels. The rules are in `megazero.optim.elementwise`, their kernels' formulas in
csrc/update/rules.hpp.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from megazero.kernels import KernelLibrary
from megazero.ops.chunks import scaled, side_by_side
from megazero.ops.cuda import CUDA_KERNELS, on_cuda_kernels
from megazero.ops.dispatch import (
    CPU,
    DEVICES,
    FLOATS,
    CallFacts,
    Implementation,
    Operator,
    kinds_of_calls,
    where,
)
from megazero.ops.native import NATIVE, address, available, update_pass
from megazero.ops.segments import NO_SIGNALS, NO_WEIGHTS, DeviceSignals, lengths_of, readable

_DEVICES = frozenset(DEVICES)
_FP32 = frozenset({torch.float32})


@dataclass(frozen=True)
class StepFacts:
    """The numbers of a step that are not the optimizer's own: its number from 1, and two rates."""

    step: int
    lr: float
    weight_decay: float


class ElementRule(Protocol):
    """An optimizer whose update of an element depends on that element alone.

    Attributes:
        name: the name of its kernels.
    """

    name: ClassVar[str]

    def move(self, at: StepFacts, p: Tensor, g: Tensor, /, *states: Tensor) -> None:
        """Move masters p by gradients g, and bring each kind of their states up to date: the formula."""

    def coefficients(self, at: StepFacts) -> tuple[float, ...]:
        """The fields of the rule's struct in csrc/update/rules.hpp."""


States = Sequence[Sequence[Tensor]]
"""For each tensor of masters, its state: one tensor of each kind."""

Weights = Sequence[Tensor | None]
"""For each tensor of masters, the tensor that also gets the new weights, rounded to its dtype; or None."""


def update_native_cpu(
    rule: ElementRule,
    at: StepFacts,
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: States,
    weights: Weights,
    scale: float,
) -> None:
    """The compiled kernel: one pass over memory, from gradients as stored to the weights."""
    coefficients = rule.coefficients(at)
    for param, grad, state, out in zip(params, grads, states, weights, strict=True):
        around = update_pass(param, grad, scale, out)
        NATIVE.update(rule.name, around, address(param), [*map(address, state)], coefficients)


@torch.no_grad()
def update_cuda(
    rule: ElementRule,
    at: StepFacts,
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: States,
    weights: Weights,
    scale: float,
    *,
    signals: DeviceSignals = NO_SIGNALS,
    kernels: KernelLibrary = CUDA_KERNELS,
) -> None:
    """The kernel for GPUs: one pass over memory for all tensors of one pair of dtypes.

    Args:
        rule, at, params, grads, states, weights, scale: as in `update_step`; a gradient that is not
            contiguous or is fp64 is copied.
        signals: the inputs of the step that only the device knows.
        kernels: the library.
    """
    grads = [readable(grad) for grad in grads]
    groups: dict[tuple[torch.dtype, torch.dtype | None], list[int]] = {}
    for index, (grad, out) in enumerate(zip(grads, weights, strict=True)):
        groups.setdefault((grad.dtype, None if out is None else out.dtype), []).append(index)
    for (grad_dtype, weight_dtype), chosen in groups.items():
        masters = [params[i] for i in chosen]
        beside = ([grads[i] for i in chosen], [weights[i] for i in chosen])
        kinds = [list(kind) for kind in zip(*(states[i] for i in chosen), strict=True)]
        kernels.launch(
            f"{rule.name}_update",
            grad_dtype,
            NO_WEIGHTS if weight_dtype is None else weight_dtype,
            len(chosen),
            lengths_of(masters, *beside, *kinds),
            masters,
            *beside,
            len(kinds),
            [tensor for kind in kinds for tensor in kind],
            scale,
            signals.scale,
            signals.overflow,
            [float(number) for number in rule.coefficients(at)],
        )


@torch.no_grad()
def adam_fused(
    rule: Any,
    at: StepFacts,
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: States,
    weights: Weights,
    scale: float,
) -> None:
    """torch's kernel of AdamW, which needs one dtype throughout: other gradients are widened in chunks."""
    counter = torch.full((), float(at.step), dtype=torch.float32, device=params[0].device)

    def move(params: list[Tensor], grads: list[Tensor], means: list[Tensor], squares: list[Tensor]) -> None:
        torch._fused_adamw_(
            params,
            grads,
            means,
            squares,
            [],
            [counter] * len(params),
            lr=at.lr,
            beta1=rule.beta1,
            beta2=rule.beta2,
            weight_decay=at.weight_decay,
            eps=rule.eps,
            amsgrad=False,
            maximize=False,
        )

    means, squares = (list(kind) for kind in zip(*states, strict=True))
    if scale == 1.0 and all(grad.dtype == param.dtype for grad, param in zip(grads, params, strict=True)):
        move(list(params), list(grads), means, squares)
    else:
        for pieces in zip(params, grads, means, squares, strict=True):
            for p, g, m, v in side_by_side(*pieces):
                move([p], [scaled(g, scale, p.dtype)], [m], [v])
    for param, out in zip(params, weights, strict=True):
        if out is not None:
            out.copy_(param)


@torch.no_grad()
def update_chunks(
    rule: ElementRule,
    at: StepFacts,
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: States,
    weights: Weights,
    scale: float,
) -> None:
    """The reference chunk by chunk, so that temporaries stay small."""
    for param, grad, state, out in zip(params, grads, states, weights, strict=True):
        for p, g, new, *parts in side_by_side(param, grad, out, *state):
            update_reference(rule, at, [p], [g], [parts], [new], scale)


@torch.no_grad()
def update_reference(
    rule: ElementRule,
    at: StepFacts,
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: States,
    weights: Weights,
    scale: float,
) -> None:
    """The rule's formula on whole tensors."""
    for param, grad, state, out in zip(params, grads, states, weights, strict=True):
        rule.move(at, param, scaled(grad, scale, param.dtype), *state)
        if out is not None:
            out.copy_(param)


@dataclass(frozen=True)
class UpdateFacts(CallFacts):
    """The facts of a step.

    Attributes:
        rule: the rule's name.
    """

    rule: str


UPDATE: Operator[Callable[..., None]] = Operator(
    "update",
    (
        Implementation("native_cpu", update_native_cpu, where(CPU, _FP32, available)),
        Implementation("cuda", update_cuda, on_cuda_kernels(_FP32)),
        Implementation("torch_fused", adam_fused, where(_DEVICES, FLOATS, rule="adam")),
        Implementation("chunks", update_chunks, where(_DEVICES, FLOATS)),
        Implementation("reference", update_reference),
    ),
    kinds_of_calls(UpdateFacts, rule=("adam", "another")),
)


def update_step(
    rule: ElementRule,
    at: StepFacts,
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: States,
    weights: Weights | None = None,
    *,
    scale: float = 1.0,
) -> None:
    """One step in place on masters and states.

    Args:
        rule: the optimizer.
        at: the step's number and rates.
        params: contiguous masters (fp32), all on one device; the other lists hold tensors of their shapes.
        grads: their gradients, of any width.
        states: their states, of the masters' dtype.
        weights: where the new weights are also written; None for nowhere.
        scale: a factor that gradients are multiplied by once they are widened.
    """
    if params:
        outs = [None] * len(params) if weights is None else weights
        chosen = UPDATE.choose(UpdateFacts.of(params[0], rule=rule.name))
        chosen.fn(rule, at, params, grads, states, outs, scale)
