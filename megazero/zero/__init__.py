"""zero: data parallelism without redundancy (ZeRO), and the optimizer over it.

Start with `table.py` (what each stage shards) and `parallel.py` (what a training step calls). `unit.py`,
`plan.py` and `layout.py` lay parameters out in buckets. `bucket.py` tracks whether a bucket's whole weights
are on this rank, `store` holds the rest of its state, and `comm_hooks` move it between the replicas.
`gather.py` and `reduce.py` decide when, and `optimizer.py` updates. `Init` and its like are DeepSpeed's.
"""

from __future__ import annotations

from typing import Any

from megazero.door import through_door


def __getattr__(name: str) -> Any:
    return through_door(
        __name__,
        name,
        "megazero.deepspeed.zero",
        "DeepSpeedTensorOverride",
        "GatheredParameters",
        "Init",
        "TiledLinear",
        "TiledLinearReturnBias",
        "ZeroParamStatus",
        "ZeroParamType",
        "register_external_parameter",
        "unregister_external_parameter",
        "unwrap_model_for_generation",
    )
