"""The ZeRO stages as rows of one table (Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward
Training Trillion Parameter Models"). Each bucket has a row, and code reads the row, never the stage's number.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StageRow:
    """The state that is sharded over the replicas; each of them holds everything else whole.

    Attributes:
        shard_state: master weights and moments. Each rank then updates only its shard of the weights.
        shard_grads: gradient sums. They are then reduced in every backward, as buckets fill.
        shard_params: weights. They are then gathered for each use and freed after it.
    """

    shard_state: bool
    shard_grads: bool
    shard_params: bool


STAGES = (
    StageRow(shard_state=False, shard_grads=False, shard_params=False),
    StageRow(shard_state=True, shard_grads=False, shard_params=False),
    StageRow(shard_state=True, shard_grads=True, shard_params=False),
    StageRow(shard_state=True, shard_grads=True, shard_params=True),
)
