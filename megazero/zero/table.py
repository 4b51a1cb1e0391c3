"""The ZeRO stages as rows of one table (Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward
Training Trillion Parameter Models"). A bucket has a row, and code asks the row, never for a stage's number.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """What the replicas cut among themselves; what they do not cut, each holds whole.

    Attributes:
        shard_state: master weights and moments. Each rank then updates its shard of the weights alone.
        shard_grads: gradient sums. They are then reduced in every backward, as buckets fill.
        shard_params: weights. They are then gathered for each use and freed after it.
    """

    shard_state: bool
    shard_grads: bool
    shard_params: bool


STAGES = (
    Row(shard_state=False, shard_grads=False, shard_params=False),
    Row(shard_state=True, shard_grads=False, shard_params=False),
    Row(shard_state=True, shard_grads=True, shard_params=False),
    Row(shard_state=True, shard_grads=True, shard_params=True),
)
