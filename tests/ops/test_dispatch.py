"""The table: first match wins, the reference is last, and what runs where can be asked."""

from __future__ import annotations

import pytest
import torch

from megazero.ops import Implementation, Operator, choose, explain, operators

CPU_FAST = Implementation(
    "fast", lambda: "fast", devices=frozenset({"cpu"}), dtypes=frozenset({torch.float32})
)
NOT_BUILT = Implementation("kernel", lambda: "kernel", available=lambda: False)
REFERENCE = Implementation("reference", lambda: "reference")
TABLE = (NOT_BUILT, CPU_FAST, REFERENCE)


def test_choose_takes_the_first_that_serves() -> None:
    assert choose(TABLE, torch.zeros(1)).name == "fast"
    assert choose(TABLE, torch.zeros(1, dtype=torch.float64)).name == "reference"
    assert choose(TABLE, torch.zeros(1, device="meta")).name == "reference"


def test_explain_groups_dtypes_by_implementation() -> None:
    assert explain(Operator("op", TABLE)) == (
        "op on cpu: reference (bfloat16, float16, float64), fast (float32)\n"
        "op on cuda: reference (bfloat16, float16, float32, float64)"
    )


def test_a_table_must_end_with_its_reference() -> None:
    with pytest.raises(AssertionError, match="the last implementation is the reference"):
        Operator("op", (REFERENCE, CPU_FAST))


def test_operators_are_named_once_each_in_order() -> None:
    names = [operator.name for operator in operators()]
    assert names == sorted(set(names))
