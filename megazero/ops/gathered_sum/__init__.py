"""Weighted sums of rows gathered by number, which combine the results of a token's experts."""

from megazero.ops.gathered_sum.front import GATHERED_SUM, gathered_sum

__all__ = ["GATHERED_SUM", "gathered_sum"]
