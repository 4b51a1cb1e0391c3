"""The examples of all operators."""

from megazero.report.kernels.cases import bias_dropout_add, cross_entropy, rms_norm, rotary, scaled_softmax

CASES = (
    *bias_dropout_add.CASES,
    *cross_entropy.CASES,
    *rms_norm.CASES,
    *rotary.CASES,
    *scaled_softmax.CASES,
)

__all__ = ["CASES"]
