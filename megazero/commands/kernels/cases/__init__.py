"""The examples of all operators."""

from megazero.commands.kernels.cases import (
    bias_dropout_add,
    bias_gelu,
    chosen_rows,
    cross_entropy,
    embedding,
    gate,
    gathered_sum,
    kept_columns,
    lamb,
    layer_norm,
    optimizers,
    permute,
    quantize,
    rms_norm,
    rotary,
    scaled_softmax,
    square_sum,
    squared_relu,
    swiglu,
    top_k,
)

CASES = (
    *bias_dropout_add.CASES,
    *bias_gelu.CASES,
    *chosen_rows.CASES,
    *cross_entropy.CASES,
    *embedding.CASES,
    *gate.CASES,
    *gathered_sum.CASES,
    *kept_columns.CASES,
    *lamb.CASES,
    *layer_norm.CASES,
    *optimizers.CASES,
    *permute.CASES,
    *quantize.CASES,
    *rms_norm.CASES,
    *rotary.CASES,
    *scaled_softmax.CASES,
    *square_sum.CASES,
    *squared_relu.CASES,
    *swiglu.CASES,
    *top_k.CASES,
)

__all__ = ["CASES"]
