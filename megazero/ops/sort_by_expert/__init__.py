"""The sort of tokens' choices of experts into rows, by expert."""

from megazero.ops.sort_by_expert.front import SORT_BY_EXPERT, sort_by_expert

__all__ = ["SORT_BY_EXPERT", "sort_by_expert"]
