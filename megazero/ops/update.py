"""One step of an optimizer that moves each element by itself, in place over lists of tensors.

The operator knows no optimizer: it is given an `ElementRule`, which has the formula in torch and the
coefficients of the kernels. The rules are in `megazero.optim.elementwise`, their kernels' formulas in
csrc/update/rules.hpp.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from megazero.kernels.library import KernelLibrary
from megazero.ops.chunks import scaled, side_by_side
from megazero.ops.cuda import cuda_kernels, on_cuda_kernels, planned
from megazero.ops.dispatch import (
    DEVICES,
    FLOATS,
    CallFacts,
    Implementation,
    Operator,
    Requirement,
    kinds_of_calls,
    where,
)
from megazero.ops.native import NATIVE, address, on_native_cpu, update_pass
from megazero.ops.segments import NO_SIGNALS, NO_WEIGHTS, DeviceSignals, lengths_of, readable

_DEVICES = frozenset(DEVICES)
_FP32 = frozenset({torch.float32})


@dataclass(frozen=True)
class StepFacts:
    """The numbers of a step that are not the optimizer's own: its number from 1, and two rates.

    Attributes:
        signals: further ones, which only the device knows; `heeds_signals` says where there may be any.
    """

    step: int
    lr: float
    weight_decay: float
    signals: DeviceSignals = NO_SIGNALS


class ElementRule(Protocol):
    """An optimizer whose update of an element depends on that element alone.

    One without `coefficients` has no kernels, and its formula moves elements on every device.

    Attributes:
        name: the name of its kernels.
    """

    name: ClassVar[str]

    def move(self, at: StepFacts, p: Tensor, g: Tensor, /, *states: Tensor) -> None:
        """Move masters p by gradients g, and bring each kind of their states up to date: the formula."""

    def coefficients(self, at: StepFacts) -> tuple[float, ...]:
        """The fields of the rule's struct in csrc/update/rules.hpp."""


@dataclass(frozen=True)
class UpdateCall:
    """One step of a rule over lists of tensors.

    Attributes:
        rule: the optimizer.
        at: the step's number and rates.
        params: contiguous masters (fp32), all on one device; the other lists hold tensors of their shapes.
        grads: their gradients, of any width, which stay as they are.
        states: for each tensor of masters its state, a tensor of each kind, of the masters' dtype.
        weights: for each, the tensor that also gets the new weights, rounded to its dtype; None for none.
        scale: a factor that gradients are multiplied by once they are widened.
    """

    rule: ElementRule
    at: StepFacts
    params: Sequence[Tensor]
    grads: Sequence[Tensor]
    states: Sequence[Sequence[Tensor]]
    weights: Sequence[Tensor | None]
    scale: float = 1.0

    def pieces(self) -> Iterator[tuple[Tensor, Tensor, Sequence[Tensor], Tensor | None]]:
        """Masters, gradient, state and weights of one tensor after the other."""
        return zip(self.params, self.grads, self.states, self.weights, strict=True)


def update_native_cpu(call: UpdateCall) -> None:
    """The compiled kernel: one pass over memory, from gradients as stored to the weights."""
    coefficients = call.rule.coefficients(call.at)
    for param, grad, state, out in call.pieces():
        around = update_pass(param, grad, call.scale, out)
        NATIVE.update(call.rule.name, around, address(param), [*map(address, state)], coefficients)


@torch.no_grad()
def update_cuda(call: UpdateCall, *, kernels: KernelLibrary | None = None) -> None:
    """The kernel for GPUs: one pass over memory for all tensors of one pair of dtypes.

    Args:
        call: the step; a gradient that is not contiguous or is fp64 is copied.
        kernels: the library; None for that of this process.
    """
    groups: dict[tuple[torch.dtype, torch.dtype | None], list[list[Any]]] = {}
    for param, grad, state, out in call.pieces():
        grad = readable(grad)
        lists = groups.setdefault((grad.dtype, None if out is None else out.dtype), [[] for _ in range(4)])
        for members, member in zip(lists, (param, grad, out, state), strict=True):
            members.append(member)
    for (grad_dtype, weight_dtype), (masters, grads, outs, states) in groups.items():
        kinds = [list(kind) for kind in zip(*states, strict=True)]
        (kernels or cuda_kernels()).launch(
            f"{call.rule.name}_update",
            grad_dtype,
            NO_WEIGHTS if weight_dtype is None else weight_dtype,
            len(masters),
            lengths_of(masters, grads, outs, *kinds),
            *(masters, grads, outs, len(kinds), [tensor for kind in kinds for tensor in kind]),
            *(call.scale, call.at.signals.scale, call.at.signals.overflow),
            [float(number) for number in call.rule.coefficients(call.at)],
        )


@torch.no_grad()
def adam_fused(call: UpdateCall) -> None:
    """torch's kernel of AdamW, which needs one dtype throughout: other gradients are widened in chunks."""
    rule: Any = call.rule
    counter = torch.full((), float(call.at.step), dtype=torch.float32, device=call.params[0].device)

    def move(params: list[Tensor], grads: list[Tensor], means: list[Tensor], squares: list[Tensor]) -> None:
        torch._fused_adamw_(
            params,
            grads,
            means,
            squares,
            [],
            [counter] * len(params),
            lr=call.at.lr,
            beta1=rule.beta1,
            beta2=rule.beta2,
            weight_decay=call.at.weight_decay,
            eps=rule.eps,
            amsgrad=False,
            maximize=False,
        )

    if call.scale == 1.0 and all(p.dtype == g.dtype for p, g, *_ in call.pieces()):
        means, squares = (list(kind) for kind in zip(*call.states, strict=True))
        move(list(call.params), list(call.grads), means, squares)
    else:
        for param, grad, state, _ in call.pieces():
            for p, g, m, v in side_by_side(param, grad, *state):
                move([p], [scaled(g, call.scale, p.dtype)], [m], [v])
    for param, _, _, out in call.pieces():
        if out is not None:
            out.copy_(param)


@torch.no_grad()
def update_chunks(call: UpdateCall) -> None:
    """The reference chunk by chunk, so that temporaries stay small."""
    for param, grad, state, out in call.pieces():
        for p, g, new, *parts in side_by_side(param, grad, out, *state):
            _move(call, p, g, parts, new)


@torch.no_grad()
def update_reference(call: UpdateCall) -> None:
    """The rule's formula on whole tensors."""
    for param, grad, state, out in call.pieces():
        _move(call, param, grad, state, out)


def _move(call: UpdateCall, p: Tensor, grad: Tensor, state: Sequence[Tensor], out: Tensor | None) -> None:
    call.rule.move(call.at, p, scaled(grad, call.scale, p.dtype), *state)
    if out is not None:
        out.copy_(p)


@dataclass(frozen=True)
class UpdateFacts(CallFacts):
    """The facts of a step.

    Attributes:
        rule: the rule's name, or `FORMULA` for one without kernels.
    """

    rule: str


FORMULA = "formula"
_COMPILED = Requirement(lambda facts: facts.rule != FORMULA, "serves rules of csrc/update only")


def has_kernels(rule: type[ElementRule]) -> bool:
    """Whether csrc/update has the rule's formula, too."""
    return rule.coefficients is not ElementRule.coefficients


def _known_as(rule: ElementRule) -> str:
    return rule.name if has_kernels(type(rule)) else FORMULA


UPDATE: Operator[Callable[..., None]] = Operator(
    "update",
    (
        Implementation("native_cpu", update_native_cpu, on_native_cpu(_FP32).needing(_COMPILED)),
        Implementation("cuda", update_cuda, on_cuda_kernels(_FP32).needing(_COMPILED)),
        planned(update_cuda, _FP32, _COMPILED),
        Implementation("torch_fused", adam_fused, where(_DEVICES, FLOATS, rule="adam")),
        Implementation("chunks", update_chunks, where(_DEVICES, FLOATS)),
        Implementation("reference", update_reference),
    ),
    kinds_of_calls(UpdateFacts, rule=("adam", "another")),
    differentiable=False,
)


def heeds_signals(device: str, rule: ElementRule) -> bool:
    """Whether a step of such a rule on fp32 masters may have `signals` there."""
    return UPDATE.choose(UpdateFacts(device, torch.float32, _known_as(rule))).fn is update_cuda


def update_step(call: UpdateCall) -> None:
    """One step in place on masters and states; weights are written beside."""
    if call.params:
        chosen = UPDATE.choose(UpdateFacts.of(call.params[0], rule=_known_as(call.rule)))
        assert call.at.signals == NO_SIGNALS or chosen.fn is update_cuda, f"{chosen.name} knows no signals"
        chosen.fn(call)
