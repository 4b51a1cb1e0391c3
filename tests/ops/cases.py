"""The calls on which every implementation must equal the reference: the examples of all operators.

Those that are for the kernels' report alone are left out, and those of attention are here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from megazero.ops import operators
from megazero.ops.attention import ATTENTION, BiasKind, MaskKind, Softcap
from megazero.ops.attention.call import AttentionCall
from megazero.ops.attention.pattern import ALL
from megazero.ops.dispatch import CallFacts, Operator
from megazero.ops.dropout import AttentionDropout
from megazero.ops.example import Example


def randn(shape: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape) * 31 + len(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


@dataclass(frozen=True)
class Case:
    operator: Operator[Any]
    example: Example

    @cached_property
    def inputs(self) -> tuple[Tensor, ...]:
        """The float inputs, fp64, to be cast."""
        shapes, scale = self.example.shapes, self.example.scale
        scales = (scale,) * len(shapes) if isinstance(scale, float) else scale
        inputs = []
        for number, (shape, own) in enumerate(zip(shapes, scales, strict=True)):
            again = shapes[:number].count(shape)
            inputs.append((randn(shape).roll(again, -1) if shape else randn(shape)) * own)
        if self.operator is ATTENTION:
            inputs[2] = randn(shapes[2]) + 1
        return tuple(inputs)

    @property
    def gradcheck(self) -> bool:
        """Whether finite differences are worth their time and precise enough."""
        few = 0 < sum(each.numel() for each in self.inputs) <= 160
        return few and self.example.scale == 1.0 == self.example.slack and self.operator.differentiable

    def call(self, fn: Callable[..., Any], *inputs: Tensor) -> Tensor:
        """All results in one tensor."""
        results = self.example.call(fn, *inputs)
        return results if isinstance(results, Tensor) else torch.cat(results, -1)

    def facts(self, dtype: torch.dtype, device: str = "cpu") -> CallFacts:
        """Of this call with inputs of `dtype`."""
        return type(self.operator.calls[0])(device, dtype, **self.example.own)

    def __str__(self) -> str:
        return f"{self.operator.name}: {self.example.label}"


def attention_examples() -> Iterator[Example]:
    """Calls of an implementation, which is told causality and the mask apart."""
    for s, t, b, n, g, d in (
        (5, 5, 2, 4, 2, 3),
        (1, 9, 2, 2, 1, 8),
        (3, 7, 1, 2, 2, 4),
        (150, 150, 2, 4, 4, 16),
        (131, 140, 1, 3, 1, 10),
        (6, 3, 1, 2, 2, 4),
    ):
        keep = randn((b, 1, s, t)) > -0.3
        keep[0, 0, s // 2] = False
        for scale, causal in ((1.0, True), (1.0, False), (12.0, True)):
            for mask in (None, keep, torch.zeros(1, 1, s, t, dtype=torch.bool)):
                masked = None if mask is None else int(mask.sum())
                label = f"s={s} t={t} b={b} n={n} g={g} d={d} x {scale} {causal=} mask={masked}"
                shapes, scales = ((s, b, n, d), (t, b, g, d), (t, b, g, d)), (scale, 1.0, 1.0)
                for p in (0.0, 0.2):
                    yield _attention(f"{label} {p=}", shapes, scales, mask, causal, p)
                if s < 7:
                    yield _attention(f"{label} capped", shapes, scales, mask, causal, 0.0, Softcap(0.8))


def _attention(label, shapes, scales, mask, causal, p, bias=None) -> Example:
    (s, b, _, d), t = shapes[0], shapes[1][0]

    def call(f, q, k, v) -> Tensor:
        keys, where = torch.arange(b, device=q.device) + 11, None if mask is None else mask.to(q.device)
        dropout = AttentionDropout(p, keys, range(s), range(t), head_offset=4) if p else None
        pattern = ALL.causally(causal)
        return f(q, k, v, AttentionCall(d**-0.5, where, bias=bias, dropout=dropout, pattern=pattern))[0]

    dense = mask is not None or (causal and s != t)
    kind = MaskKind.DENSE if dense else MaskKind.CAUSAL if causal else MaskKind.NONE
    own = {"mask": kind, "dropout": p > 0, "lse": False}
    own |= {"bias": BiasKind.SOFTCAP} if bias is not None else {}
    slack = (8.0 if scales[0] > 1 else 1.0) * (2.0 if p else 1.0)
    return Example(label, shapes, call, 1.0 if scales[0] == 1.0 else scales, own, slack)


def all_cases() -> list[Case]:
    examples = [(operator, example) for operator in operators() for example in operator.examples()]
    examples += [(ATTENTION, example) for example in attention_examples()]
    return [Case(*pair) for pair in examples if pair[1].traffic is None]
