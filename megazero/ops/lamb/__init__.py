"""The two passes of LAMB over flat tensors, and their tables of implementations."""

from megazero.ops.lamb.front import (
    LAMB_MOVE,
    LAMB_NORMS,
    lamb_move,
    lamb_move_all,
    lamb_norms,
    lamb_norms_of_all,
)
from megazero.ops.lamb.reference import lamb_move_reference, lamb_norms_reference

__all__ = [
    "LAMB_MOVE",
    "LAMB_NORMS",
    "lamb_move",
    "lamb_move_all",
    "lamb_move_reference",
    "lamb_norms",
    "lamb_norms_of_all",
    "lamb_norms_reference",
]
