"""The permutation of tokens into the rows that experts take."""

from megazero.ops.permute.front import PERMUTE, permute

__all__ = ["PERMUTE", "permute"]
