"""Counter-based randomness: a random number is a function of (key, index), never of a stream's state.

So any rank can produce its slice of a logically whole tensor, recompute replays without saved state,
and every layout sees the same numbers. `splitmix` holds the 64-bit generator, `normal` the initial
weights, `keep` the cheaper 32-bit generator of dropout masks, `reference` both in Python integers.
"""

from megazero.ops.counter_random.keep import (
    KeepRows,
    keep_columns,
    keep_mask,
    keep_multiplier,
    keep_threshold,
)
from megazero.ops.counter_random.normal import normal, normal_block
from megazero.ops.counter_random.splitmix import derive, hash_uniform

__all__ = [
    "KeepRows",
    "derive",
    "hash_uniform",
    "keep_columns",
    "keep_mask",
    "keep_multiplier",
    "keep_threshold",
    "normal",
    "normal_block",
]
