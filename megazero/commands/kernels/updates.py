"""Examples of optimizers' steps with bf16 gradients and bf16 weights, for the table of kernels.

They are not beside the operator because it knows no optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import MappingProxyType

import torch

from megazero.ops.example import Example, Traffic
from megazero.ops.update import StepFacts, UpdateCall, has_kernels
from megazero.optim.elementwise import ELEMENTWISE, Elementwise

COUNT = 3 << 14
_BF16 = MappingProxyType({"bf16": torch.bfloat16})


def update_examples() -> Iterator[Example]:
    """A step of each elementwise optimizer with kernels, which reads or writes all of its tensors once."""
    for rule in filter(has_kernels, ELEMENTWISE.values()):
        yield _example(rule())


def _example(rule: Elementwise) -> Example:
    kinds = len(rule.state_names)
    moved = {f"{rule.name}_update": (8 * (1 + kinds) + 2 + 2) * COUNT}

    def call(f: Callable[[UpdateCall], None]) -> None:
        master, *state = (torch.rand(COUNT) for _ in range(1 + kinds))
        grad, weights = (torch.rand(COUNT).bfloat16() for _ in range(2))
        f(UpdateCall(rule, StepFacts(1, 1e-3, 0.1), [master], [grad], [state], [weights]))

    return Example(rule.name, (), call, traffic=Traffic(lambda dtype: moved, _BF16))
