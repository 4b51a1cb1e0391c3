"""The state of routers, as parts of a checkpoint."""

from __future__ import annotations

from megazero.checkpoint import ROUTER, Key, Part, Source
from megazero.moe import RouterLoads
from megazero.mpu import ParallelContext


def router_parts_to_write(loads: RouterLoads, context: ParallelContext) -> list[Part]:
    """The loads and biases of the routers here, which the first rank of each stage writes."""
    if context.groups["stage"].rank:
        return []
    return [Part.whole(Key(name, ROUTER), tensor) for name, tensor in loads.state().items()]


def router_parts_to_read(loads: RouterLoads, source: Source) -> list[Part]:
    """The loads and biases that the source has. Converted models have none: their routers begin evenly."""
    tensors = {Key(name, ROUTER): tensor for name, tensor in loads.state().items()}
    return [Part.whole(key, tensor) for key, tensor in tensors.items() if key in source.shapes]
