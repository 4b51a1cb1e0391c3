"""The sum of the squares of all elements of a list of tensors, in fp64."""

from megazero.ops.square_sum.front import SQUARE_SUM, square_sum
from megazero.ops.square_sum.reference import square_sum_reference

__all__ = ["SQUARE_SUM", "square_sum", "square_sum_reference"]
