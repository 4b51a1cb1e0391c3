"""Which boxes of which logical tensors a rank holds, in an optimizer's buckets or a model's parameters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

from torch import Tensor, nn

from megazero.checkpoint.box import Box, boxes_of_span
from megazero.checkpoint.part import WEIGHT, Key, Part
from megazero.mpu import ParallelContext, ParamSpec, spec_of
from megazero.zero import BucketLayout, Optimizer


def parts_to_write(optimizer: Optimizer, context: ParallelContext, *, moments: bool = True) -> list[Part]:
    """The parts of masters and moments that this rank writes; over all ranks each element is written once.

    What is sharded is written by its owners. What replicas hold whole is divided among them, parameter by
    parameter, so that each writes about the same amount; so is what all tensor-parallel ranks hold.
    """
    parts: list[Part] = []
    dealt: dict[int, list[int]] = defaultdict(lambda: [0] * context.world_size)
    for layout, flats in _flats(optimizer, moments):
        loads = dealt[layout.ranks]
        for i, (spec, (start, stop)) in enumerate(zip(layout.specs, layout.spans, strict=True)):
            number, copies = spec.copy(context.place)
            if spec.tied_with is not None or i % copies != number:
                continue
            if not layout.row.shard_state:
                writer = min(range(layout.ranks), key=loads.__getitem__)
                loads[writer] += stop - start
                if writer != layout.rank:
                    continue
            elif start == stop and layout.rank != 0:
                continue
            for kind, flat in flats.items():
                parts += _parts(layout, spec, kind, flat, start, stop, context)
    return parts


def parts_to_read(optimizer: Optimizer, context: ParallelContext, *, moments: bool = True) -> list[Part]:
    """All parts of masters and moments that this rank holds; padding of the vocabulary is zeroed here."""
    parts: list[Part] = []
    for layout, flats in _flats(optimizer, moments):
        for spec, (start, stop) in zip(layout.specs, layout.spans, strict=True):
            for kind, flat in flats.items():
                found = list(_parts(layout, spec, kind, flat, start, stop, context))
                if spec.padded_shape != spec.shape:
                    flat[layout.overlap(start, stop)].zero_()
                parts += found
    return parts


def parts_of_parameters(parameters: Iterable[nn.Parameter], context: ParallelContext) -> list[Part]:
    """Only the weights, of parameters that hold this rank's whole slice."""
    parts: list[Part] = []
    for param in parameters:
        spec = spec_of(param)
        flat = param.detach().view(-1)
        if spec.padded_shape != spec.shape:
            flat.zero_()
        parts += _slice_parts(spec, WEIGHT, flat, 0, flat.numel(), context)
    return parts


def state_keys(optimizer: Optimizer) -> set[Key]:
    """The logical tensors of which this rank's buckets, or their copies on other replicas, hold a part."""
    return {
        Key(spec.tied_with or spec.name, kind)
        for layout, flats in _flats(optimizer, moments=True)
        for spec in layout.specs
        for kind in flats
    }


def _flats(optimizer: Optimizer, moments: bool) -> Iterator[tuple[BucketLayout, Mapping[str, Tensor]]]:
    for bucket in optimizer.store.buckets:
        flats = optimizer.store.at_rest(bucket)
        yield bucket.layout, flats if moments else {WEIGHT: flats[WEIGHT]}


def _parts(
    layout: BucketLayout,
    spec: ParamSpec,
    kind: str,
    flat: Tensor,
    start: int,
    stop: int,
    context: ParallelContext,
) -> Iterator[Part]:
    piece = flat[layout.overlap(start, stop)]
    skipped = max(0, layout.state_range.start - start)
    yield from _slice_parts(spec, kind, piece, skipped, skipped + piece.numel(), context)


def _slice_parts(
    spec: ParamSpec, kind: str, flat: Tensor, start: int, stop: int, context: ParallelContext
) -> Iterator[Part]:
    """Elements `start` to `stop` of this rank's flattened slice, as boxes of the whole."""
    key = Key(spec.tied_with or spec.name, kind)
    whole = Box.whole(spec.shape)
    if not whole.numel:
        yield Part(key, spec.shape, whole, flat.new_empty(spec.shape))
        return
    offset = spec.offset(context.place)
    at = 0
    for box in boxes_of_span(spec.local_shape(context.place), start, stop):
        memory = flat[at : at + box.numel].view(box.shape)
        at += box.numel
        place = box.shifted(offset)
        present = place.overlap(whole)
        if present is not None:
            yield Part(key, spec.shape, present, memory[present.within(place)])
