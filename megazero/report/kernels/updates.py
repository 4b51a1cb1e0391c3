"""Examples of optimizers' steps with bf16 gradients and bf16 weights, for the table of kernels.

All is read or written once, moments and masters both. LAMB's are two passes over the parameters of a bucket
in one launch each: the pieces lie one behind the other, so most begin within a pack and end within another.
What must move is a piece's state, once in each pass, and its norms and rate; the sums of chunks count only
where they are all that a kernel reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from megazero.ops.example import Example, Traffic

COUNT = 3 << 14
_MASTERS, _MOMENT, _GRADIENT, _WEIGHTS = 8 * COUNT, 8 * COUNT, 2 * COUNT, 2 * COUNT
_ONE_MOMENT = _MASTERS + _MOMENT + _GRADIENT + _WEIGHTS
# Biases and norms, matrices, and one of several chunks of 16,384, of which the last is small.
SIZES = (*(768, 1003, 250, 2049) * 10, 3 << 14)
_ELEMENTS = sum(SIZES)
_TERMS: Mapping[str, float] = MappingProxyType({"factor": 1.0, "eps": 1e-6, "weight_decay": 0.1})


def _tensors() -> tuple[Tensor, ...]:
    """Masters, gradients, two moments and weights."""
    masters, first, second = (torch.rand(COUNT) for _ in range(3))
    return masters, torch.rand(COUNT).bfloat16(), first, second, torch.rand(COUNT).bfloat16()


def _adam(f: Callable[..., None]) -> None:
    lists = ([tensor] for tensor in _tensors())
    f(*lists, step=1, lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)


def _sgd(f: Callable[..., None]) -> None:
    p, g, u, _, weights = _tensors()
    f(p, g, u, weights, lr=1e-3, momentum=0.9, weight_decay=0.1)


def _lion(f: Callable[..., None]) -> None:
    p, g, m, _, weights = _tensors()
    f(p, g, m, weights, lr=1e-3, beta1=0.9, beta2=0.95, weight_decay=0.1)


def _adagrad(f: Callable[..., None]) -> None:
    p, g, total, _, weights = _tensors()
    f(p, g, total, weights, lr=1e-3, eps=1e-8, weight_decay=0.1)


def _cut(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return list(torch.rand(_ELEMENTS).to(dtype).split(SIZES))


def _chunks() -> int:
    """Chunks of all pieces; a piece that begins within a pack of 4 starts its first chunk there."""
    begins = [sum(SIZES[:number]) for number in range(len(SIZES))]
    return sum(-(-(size + begin % 4) // (1 << 14)) for size, begin in zip(SIZES, begins, strict=True))


def _lamb_norms(f: Callable[..., Tensor]) -> None:
    f(_cut(), _cut(torch.bfloat16), _cut(), _cut(), beta1=0.9, beta2=0.95, **_TERMS)


def _lamb_move(f: Callable[..., None]) -> None:
    rates = torch.full((len(SIZES),), 1e-3).unbind()
    f(_cut(), _cut(), _cut(), rates, _cut(torch.bfloat16), **_TERMS)


_STEPS: Mapping[str, tuple[Callable[..., None], Mapping[str, int]]] = MappingProxyType(
    {
        "adam": (_adam, {"adam_update": _ONE_MOMENT + _MOMENT}),
        "sgd": (_sgd, {"sgd_update": _ONE_MOMENT}),
        "lion": (_lion, {"lion_update": _ONE_MOMENT}),
        "adagrad": (_adagrad, {"adagrad_update": _ONE_MOMENT}),
        "lamb_norms": (
            _lamb_norms,
            {
                "lamb_moments": (4 + 2 + 2 * 8) * _ELEMENTS,
                "lamb_sums": 16 * (_chunks() + len(SIZES)),
            },
        ),
        "lamb_move": (_lamb_move, {"lamb_move": (8 + 2 * 4 + 2) * _ELEMENTS + 4 * len(SIZES)}),
    }
)


def update_examples(operator: str) -> Iterator[Example]:
    """The example of an operator that is an optimizer's step; none of another."""
    if operator in _STEPS:
        call, moved = _STEPS[operator]
        label = operator.partition("_")[0]  # LAMB's two are one step
        yield Example(label, (), call, traffic=Traffic(lambda dtype: moved, {"bf16": torch.bfloat16}))
