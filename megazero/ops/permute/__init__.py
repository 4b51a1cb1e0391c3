"""The rows that experts get of tokens."""

from megazero.ops.permute.front import PERMUTE, permute

__all__ = ["PERMUTE", "permute"]
