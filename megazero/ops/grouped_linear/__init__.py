"""Products of groups of rows with a matrix each, as experts need them."""

from megazero.ops.grouped_linear.front import GROUPED_LINEAR, GROUPED_OUTER, grouped_linear, grouped_outer
from megazero.ops.grouped_linear.reference import grouped_linear_reference, grouped_outer_reference

__all__ = [
    "GROUPED_LINEAR",
    "GROUPED_OUTER",
    "grouped_linear",
    "grouped_linear_reference",
    "grouped_outer",
    "grouped_outer_reference",
]
