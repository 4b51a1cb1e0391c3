"""Weighted sums of rows gathered by number: how a token's experts' results become one."""

from megazero.ops.gathered_sum.front import GATHERED_SUM, gathered_sum

__all__ = ["GATHERED_SUM", "gathered_sum"]
