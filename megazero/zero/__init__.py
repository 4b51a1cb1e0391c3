"""zero: data parallelism without redundancy (ZeRO), and the optimizer over it.

Start with `table.py` (what each stage shards) and `parallel.py` (what a training step calls). `unit.py`,
`plan.py` and `layout.py` lay parameters out in buckets. `bucket.py` tracks whether a bucket's whole weights
are on this rank, `store` holds the rest of its state, and `comm_hooks` move it between the replicas.
`gather.py` and `reduce.py` decide when, and `optimizer.py` updates. `Init` and its like are DeepSpeed's.
"""

from __future__ import annotations

from typing import Any

from megazero.door import through_door
from megazero.zero.bucket import Bucket
from megazero.zero.build import build_store
from megazero.zero.comm_hooks import (
    CommHook,
    ExactCommHook,
    NodeCommHook,
    QuantizedGradients,
    QuantizedWeights,
    Reduction,
    choose_comm_hook,
)
from megazero.zero.copies import CopyCheck, CopyDifference, CopyFindings
from megazero.zero.delayed import IN_USE, DelayedUpdates
from megazero.zero.fingerprint import Fingerprints
from megazero.zero.layout import BucketLayout, Segment
from megazero.zero.optimizer import Optimizer, StepReport
from megazero.zero.parallel import DataParallel
from megazero.zero.plan import BucketKey, BucketMember, plan_buckets
from megazero.zero.policy import ZeroPolicy
from megazero.zero.reduce import GradientReducer
from megazero.zero.store import (
    GRADIENT,
    HELD,
    WEIGHT,
    DeviceStore,
    DiskTier,
    HostTier,
    LoadedBucket,
    OffloadStore,
    Sizes,
    StatePlacement,
    Store,
    offloaded_bytes,
    store_kind,
    traffic,
)
from megazero.zero.table import STAGES, StageRow
from megazero.zero.unit import Unit, module_units

__all__ = [
    "GRADIENT",
    "HELD",
    "IN_USE",
    "STAGES",
    "WEIGHT",
    "Bucket",
    "BucketKey",
    "BucketLayout",
    "BucketMember",
    "CommHook",
    "CopyCheck",
    "CopyDifference",
    "CopyFindings",
    "DataParallel",
    "DelayedUpdates",
    "DeviceStore",
    "DiskTier",
    "ExactCommHook",
    "Fingerprints",
    "GradientReducer",
    "HostTier",
    "LoadedBucket",
    "NodeCommHook",
    "OffloadStore",
    "Optimizer",
    "QuantizedGradients",
    "QuantizedWeights",
    "Reduction",
    "Segment",
    "Sizes",
    "StageRow",
    "StatePlacement",
    "StepReport",
    "Store",
    "Unit",
    "ZeroPolicy",
    "build_store",
    "choose_comm_hook",
    "module_units",
    "offloaded_bytes",
    "plan_buckets",
    "store_kind",
    "traffic",
]


def __getattr__(name: str) -> Any:
    return through_door(
        __name__,
        name,
        "megazero.deepspeed.zero",
        "GatheredParameters",
        "Init",
        "register_external_parameter",
    )
