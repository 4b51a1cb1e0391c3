"""residual + dropout(x + bias): the end of every attention and MLP block."""

from megazero.ops.bias_dropout_add.front import BIAS_DROPOUT_ADD, bias_dropout_add

__all__ = ["BIAS_DROPOUT_ADD", "bias_dropout_add"]
