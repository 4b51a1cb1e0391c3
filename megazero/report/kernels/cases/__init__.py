"""The examples of all operators."""

from megazero.report.kernels.cases import bias_gelu, layer_norm, rms_norm, squared_relu, swiglu

CASES = (*bias_gelu.CASES, *layer_norm.CASES, *rms_norm.CASES, *squared_relu.CASES, *swiglu.CASES)

__all__ = ["CASES"]
