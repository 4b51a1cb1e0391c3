"""zero: the data-parallel optimizer. `bucket.py` holds flat parameters, `reduce.py` sums gradients over the
ranks, `optimizer.py` steps. ZeRO stage 0: every data-parallel rank holds everything.
"""

from megazero.zero.bucket import Bucket, BucketKey, build_buckets, plan_buckets
from megazero.zero.optimizer import Optimizer, StepReport
from megazero.zero.reduce import GradientReducer

__all__ = [
    "Bucket",
    "BucketKey",
    "GradientReducer",
    "Optimizer",
    "StepReport",
    "build_buckets",
    "plan_buckets",
]
