"""The examples of all operators."""

from megazero.report.kernels.cases import rms_norm

CASES = (*rms_norm.CASES,)

__all__ = ["CASES"]
