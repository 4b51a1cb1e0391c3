"""The public rotary embedding and its table of implementations."""

from __future__ import annotations

from torch import Tensor

from megazero.ops.dispatch import TRAINING_FLOATS, Implementation, Operator, choose
from megazero.ops.rotary.fused import apply_rotary_fused
from megazero.ops.rotary.reference import apply_rotary_reference

ROTARY = Operator(
    "rotary",
    (
        Implementation("fused", apply_rotary_fused, dtypes=TRAINING_FLOATS),
        Implementation("reference", apply_rotary_reference),
    ),
)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the first channels of x [s, b, n, d] by the angles of `rotary_table`; the rest pass through.

    Halves convention: channel i pairs with channel i + dim/2 (GPT-NeoX, Hugging Face's Llama). The
    table is a constant: no gradient flows to it. Computed in the table's dtype, returned in x's.
    """
    return choose(ROTARY.implementations, x).fn(x, cos, sin)
