"""The examples of all operators."""

from megazero.report.kernels.cases import (
    chosen_rows,
    embedding,
    gate,
    gathered_sum,
    kept_columns,
    rms_norm,
    top_k,
)

CASES = (
    *chosen_rows.CASES,
    *embedding.CASES,
    *gate.CASES,
    *gathered_sum.CASES,
    *kept_columns.CASES,
    *rms_norm.CASES,
    *top_k.CASES,
)

__all__ = ["CASES"]
