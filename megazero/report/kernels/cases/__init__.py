"""The examples of all operators."""

from megazero.report.kernels.cases import (
    bias_gelu,
    layer_norm,
    optimizers,
    quantize,
    rms_norm,
    square_sum,
    squared_relu,
    swiglu,
)

CASES = (
    *bias_gelu.CASES,
    *layer_norm.CASES,
    *optimizers.CASES,
    *quantize.CASES,
    *rms_norm.CASES,
    *square_sum.CASES,
    *squared_relu.CASES,
    *swiglu.CASES,
)

__all__ = ["CASES"]
