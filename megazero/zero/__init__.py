"""zero: data parallelism without redundancy (ZeRO), and the optimizer over it.

Start with `table.py` (what each stage shards) and `parallel.py` (what a training step calls). `unit.py`,
`plan.py` and `bucket.py` lay parameters out, `gather.py` and `reduce.py` communicate, `optimizer.py` updates.
"""

from megazero.zero.bucket import Bucket, Segment, build_buckets
from megazero.zero.init import GatheredParameters, Init, register_external_parameter
from megazero.zero.optimizer import Optimizer, StepReport
from megazero.zero.parallel import DataParallel
from megazero.zero.plan import BucketKey, Slot, plan_buckets
from megazero.zero.policy import ZeroPolicy
from megazero.zero.reduce import GradientReducer
from megazero.zero.table import STAGES, Row
from megazero.zero.unit import Unit, module_units

__all__ = [
    "STAGES",
    "Bucket",
    "BucketKey",
    "DataParallel",
    "GatheredParameters",
    "GradientReducer",
    "Init",
    "Optimizer",
    "Row",
    "Segment",
    "Slot",
    "StepReport",
    "Unit",
    "ZeroPolicy",
    "build_buckets",
    "module_units",
    "plan_buckets",
    "register_external_parameter",
]
