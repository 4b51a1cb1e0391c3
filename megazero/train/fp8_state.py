"""The state of linear layers with 8-bit products, as parts of a checkpoint."""

from __future__ import annotations

from megazero.checkpoint import FP8, Key, Part, Source
from megazero.layers import Fp8State
from megazero.mpu import ParallelContext


def fp8_parts_to_write(fp8: Fp8State, context: ParallelContext) -> list[Part]:
    """The histories and scales of the layers here, which the first rank of each stage writes."""
    if context.groups["stage"].rank:
        return []
    return [Part.whole(Key(name, FP8), tensor) for name, tensor in fp8.state().items()]


def fp8_parts_to_read(fp8: Fp8State, source: Source) -> list[Part]:
    """The histories and scales that the source has in the same shape; one of another length begins anew."""
    tensors = {Key(name, FP8): tensor for name, tensor in fp8.state().items()}
    return [
        Part.whole(key, tensor) for key, tensor in tensors.items() if source.shapes.get(key) == tensor.shape
    ]
