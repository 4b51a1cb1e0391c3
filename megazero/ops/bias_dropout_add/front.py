"""The public bias + dropout + residual and its table of implementations."""

from __future__ import annotations

from torch import Tensor

from megazero.ops.bias_dropout_add.chunked import bias_dropout_add_chunked
from megazero.ops.bias_dropout_add.reference import bias_dropout_add_reference
from megazero.ops.dispatch import TRAINING_FLOATS, Implementation, Operator, choose
from megazero.ops.dropout import Dropout

BIAS_DROPOUT_ADD = Operator(
    "bias_dropout_add",
    (
        # The multiplier 1 / (1 - p) is fp32, so fp64 takes the reference.
        Implementation("chunked", bias_dropout_add_chunked, dtypes=TRAINING_FLOATS),
        Implementation("reference", bias_dropout_add_reference),
    ),
)


def bias_dropout_add(x: Tensor, bias: Tensor | None, residual: Tensor, dropout: Dropout | None) -> Tensor:
    """residual + dropout(x + bias) for x and residual [s, b, h], bias [h] or None.

    The mask is a function of the dropout's keys and absolute positions; see `ops.dropout`. Without
    dropout it is a plain sum. Raises ValueError if the keys are not one per sequence.
    """
    if dropout is not None and dropout.keys.shape != x.shape[1:2]:
        raise ValueError(
            f"`keys` must hold one key per sequence ({x.shape[1]}), "
            f"but has shape {tuple(dropout.keys.shape)}; give int64 [b]."
        )
    return choose(BIAS_DROPOUT_ADD.implementations, x).fn(x, bias, residual, dropout)
