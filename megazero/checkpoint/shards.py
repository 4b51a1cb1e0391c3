"""Which boxes of which logical tensors a rank holds, of an optimizer's buckets or of a model's parameters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from torch import Tensor, nn

from megazero.checkpoint.box import Box, boxes_of_span
from megazero.checkpoint.part import WEIGHT, Key, Part
from megazero.mpu import ParallelContext, ParamSpec, spec_of
from megazero.zero import Bucket, Optimizer


def parts_to_write(optimizer: Optimizer, context: ParallelContext, *, moments: bool = True) -> list[Part]:
    """What this rank writes of the masters and moments; over all ranks each element is written once.

    What is sharded is written by its owners. What replicas hold whole is dealt to them, parameter by
    parameter, so that each writes about as much; likewise what all tensor-parallel ranks hold.
    """
    parts: list[Part] = []
    dealt: dict[int, list[int]] = defaultdict(lambda: [0] * context.world_size)
    for bucket, flats in _flats(optimizer, moments):
        group = bucket.group
        loads = dealt[group.size]
        for i, (spec, start, stop) in enumerate(_places(bucket)):
            if spec.tied_with is not None or (
                spec.shard_dim is None and i % context.tp.size != context.tp.rank
            ):
                continue
            if not bucket.row.shard_state:
                writer = min(range(group.size), key=loads.__getitem__)
                loads[writer] += stop - start
                if writer != group.rank:
                    continue
            elif start == stop and group.rank != 0:
                continue
            for kind, flat in flats.items():
                parts += _parts(bucket, spec, kind, flat, start, stop, context)
    return parts


def parts_to_read(optimizer: Optimizer, context: ParallelContext, *, moments: bool = True) -> list[Part]:
    """All that this rank holds of the masters and moments; padding of the vocabulary is zeroed here."""
    parts: list[Part] = []
    for bucket, flats in _flats(optimizer, moments):
        for spec, start, stop in _places(bucket):
            for kind, flat in flats.items():
                found = list(_parts(bucket, spec, kind, flat, start, stop, context))
                if spec.padded_size is not None:
                    _overlapping(bucket, flat, start, stop).zero_()
                parts += found
    return parts


def parts_of_parameters(parameters: Iterable[nn.Parameter], context: ParallelContext) -> list[Part]:
    """The weights alone, of parameters that are whole on this tensor-parallel rank."""
    parts: list[Part] = []
    for param in parameters:
        spec = spec_of(param)
        flat = param.detach().view(-1)
        if spec.padded_size is not None:
            flat.zero_()
        parts += _slice_parts(spec, WEIGHT, flat, 0, flat.numel(), context)
    return parts


def state_keys(optimizer: Optimizer) -> set[Key]:
    """The logical tensors of which this rank's buckets hold a part, or their other replicas do."""
    return {
        Key(spec.tied_with or spec.name, kind)
        for bucket, flats in _flats(optimizer, moments=True)
        for spec in bucket.specs
        for kind in flats
    }


def _flats(optimizer: Optimizer, moments: bool) -> Iterator[tuple[Bucket, dict[str, Tensor]]]:
    for bucket, state in zip(optimizer.buckets, optimizer.states, strict=True):
        yield bucket, {WEIGHT: bucket.master, **(state if moments else {})}


def _places(bucket: Bucket) -> Iterator[tuple[ParamSpec, int, int]]:
    for spec, param, start in zip(bucket.specs, bucket.params, bucket.offsets, strict=True):
        yield spec, start, start + param.numel()


def _overlapping(bucket: Bucket, flat: Tensor, start: int, stop: int) -> Tensor:
    """What a flat tensor over `state_range` holds of elements `start` to `stop` of the bucket."""
    first, last = bucket.state_range.start, bucket.state_range.stop
    begin, end = max(start, first), min(stop, last)
    return flat[begin - first : max(begin, end) - first]


def _parts(
    bucket: Bucket, spec: ParamSpec, kind: str, flat: Tensor, start: int, stop: int, context: ParallelContext
) -> Iterator[Part]:
    piece = _overlapping(bucket, flat, start, stop)
    skipped = max(0, bucket.state_range.start - start)
    yield from _slice_parts(spec, kind, piece, skipped, skipped + piece.numel(), context)


def _slice_parts(
    spec: ParamSpec, kind: str, flat: Tensor, start: int, stop: int, context: ParallelContext
) -> Iterator[Part]:
    """Elements `start` to `stop` of this tensor-parallel rank's flattened slice, as boxes of the whole."""
    key = Key(spec.tied_with or spec.name, kind)
    whole = Box.whole(spec.shape)
    if not whole.numel:
        yield Part(key, spec.shape, whole, flat.new_empty(spec.shape))
        return
    offset = spec.offset(context.tp.rank, context.tp.size)
    at = 0
    for box in boxes_of_span(spec.local_shape(context.tp.size), start, stop):
        memory = flat[at : at + box.numel].view(box.shape)
        at += box.numel
        place = box.shifted(offset)
        present = place.overlap(whole)
        if present is not None:
            yield Part(key, spec.shape, present, memory[present.within(place)])
