"""The examples of all operators."""

from megazero.report.kernels.cases import optimizers, quantize, rms_norm, square_sum

CASES = (*rms_norm.CASES, *optimizers.CASES, *quantize.CASES, *square_sum.CASES)

__all__ = ["CASES"]
