"""The parts of logical tensors that a rank has in its optimizer's buckets or its model's parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace

from torch import Tensor, nn

from megazero.checkpoint.box import Box, boxes_of_span
from megazero.checkpoint.part import WEIGHT, Key, Part
from megazero.mpu.context import ParallelContext
from megazero.mpu.param_spec import ParamSpec, spec_of
from megazero.optim.rule import SERVER_ERROR
from megazero.zero.delayed import IN_USE
from megazero.zero.layout import BucketLayout
from megazero.zero.optimizer import Optimizer
from megazero.zero.table import STAGES


def parts_to_write(optimizer: Optimizer, context: ParallelContext, *, moments: bool = True) -> list[Part]:
    """The parts of masters and moments that this rank writes; over all ranks each element is written once.

    A shard is written by its owner. Where replicas (or tensor-parallel ranks) have equal copies, the
    parameters are divided among them, so that each writes about as many bytes. State that differs between
    replicas becomes one row per replica of a larger tensor, see `ReplicaRows`.
    """
    parts: list[Part] = []
    totals: Counter[int] = Counter()  # number of replicas -> elements of which each of them has a copy
    for layout, _, _ in _flats(optimizer, moments):
        spans = (span for i, span in enumerate(layout.spans) if _writes(i, layout.specs[i], context))
        totals[layout.ranks] += 0 if layout.row.shard_state else sum(stop - start for start, stop in spans)
    dealt: Counter[int] = Counter()
    for layout, flats, offloaded in _flats(optimizer, moments):
        for i, (spec, (start, stop)) in enumerate(zip(layout.specs, layout.spans, strict=True)):
            if not _writes(i, spec, context):
                continue
            if not layout.row.shard_state:
                # The parameter's midpoint in the sequence of all elements decides which replica writes it.
                middle = dealt[layout.ranks] + (stop - start) // 2
                dealt[layout.ranks] += stop - start
                writer = middle * layout.ranks // max(1, totals[layout.ranks])
                if min(writer, layout.ranks - 1) != layout.rank:
                    continue
            elif start == stop and layout.rank != 0:  # an empty parameter is listed once
                continue
            for kind, flat in flats.items():
                own = _parts(layout, spec, kind, flat, start, stop, context)
                parts += [replace(part, offloaded=True) for part in own] if kind in offloaded else own
    for layout, flats in _private(optimizer, moments):
        for i, (spec, span) in enumerate(zip(layout.specs, layout.spans, strict=True)):
            if _writes(i, spec, context):
                parts += _rows(layout, spec, flats, span, context)
    for layout, number, scalars in _scalars(optimizer, moments):
        spec = layout.specs[number]
        first = all(context.place.index(cut.axis) == 0 for cut in spec.cuts)
        if layout.rank == 0 and first and _writes(number, spec, context):
            parts += scalars
    return parts


def parts_to_read(optimizer: Optimizer, context: ParallelContext, *, moments: bool = True) -> list[Part]:
    """All parts of masters and moments that this rank has; zeroes vocabulary padding, which no file has."""
    parts: list[Part] = []
    for layout, flats, _ in _flats(optimizer, moments):
        for spec, (start, stop) in zip(layout.specs, layout.spans, strict=True):
            for kind, flat in flats.items():
                if kind == IN_USE:
                    continue
                own = list(_parts(layout, spec, kind, flat, start, stop, context))
                if spec.padded_shape != spec.shape:
                    flat[layout.overlap(start, stop)].zero_()
                parts += own
    for layout, flats in _private(optimizer, moments):
        for spec, span in zip(layout.specs, layout.spans, strict=True):
            own = list(_rows(layout, spec, flats, span, context))
            if spec.padded_shape != spec.shape:
                for flat in flats.values():
                    flat[slice(*span)].zero_()
            parts += own
    for _, _, scalars in _scalars(optimizer, moments):
        parts += scalars
    return parts


def parts_in_use(optimizer: Optimizer, context: ParallelContext) -> list[Part]:
    """All parts of the weights in use that this rank has, if delayed updates let them lag behind masters."""
    return [
        part
        for layout, flats, _ in _flats(optimizer, True)
        for spec, span in zip(layout.specs, layout.spans, strict=True)
        for part in (_parts(layout, spec, IN_USE, flats[IN_USE], *span, context) if IN_USE in flats else ())
    ]


def parts_of_parameters(parameters: Iterable[nn.Parameter], context: ParallelContext) -> list[Part]:
    """The parts of the weights in parameters that have this rank's whole slice (no ZeRO stage 3)."""
    parts: list[Part] = []
    for param in parameters:
        spec = spec_of(param)
        flat = param.detach().view(-1)
        if spec.padded_shape != spec.shape:
            flat.zero_()
        parts += _slice_parts(spec, WEIGHT, flat, 0, flat.numel(), context)
    return parts


def state_keys(optimizer: Optimizer) -> set[Key]:
    """The logical tensors with a part in this rank's buckets or in another replica's copy of them."""
    return {
        Key(spec.tied_with or spec.name, kind)
        for flats_of in (_flats, _private)
        for layout, flats, *_ in flats_of(optimizer, moments=True)
        for spec in layout.specs
        for kind in flats
    } | {part.key for _, _, scalars in _scalars(optimizer, moments=True) for part in scalars}


def _flats(
    optimizer: Optimizer, moments: bool
) -> Iterator[tuple[BucketLayout, Mapping[str, Tensor], Collection[str]]]:
    """State that replicas share: layout, flat tensors over `state_range` by kind, and offloaded kinds."""
    apart = {*optimizer.private_kinds, *optimizer.rule.needs.scalars, SERVER_ERROR}
    for bucket in optimizer.store.buckets:
        flats, layout = optimizer.store.at_rest(bucket), bucket.layout
        offloaded = optimizer.store.offloaded.get(bucket, ())
        shared = {kind: flat for kind, flat in flats.items() if kind not in apart}
        if optimizer.delayed is not None and bucket.key.trainable:
            shared[IN_USE] = bucket.weights_in_use()
        yield layout, shared if moments else {WEIGHT: flats[WEIGHT]}, offloaded
        if moments and SERVER_ERROR in flats:  # sliced over replicas, as at stage 1, whatever the stage is
            yield replace(layout, row=STAGES[1]), {SERVER_ERROR: flats[SERVER_ERROR]}, ()


def _private(optimizer: Optimizer, moments: bool) -> Iterator[tuple[BucketLayout, Mapping[str, Tensor]]]:
    """State that differs between replicas: layouts and flat tensors [padded] by kind."""
    if moments and (kinds := optimizer.private_kinds):
        for bucket in optimizer.store.buckets:
            flats = optimizer.store.at_rest(bucket)
            yield bucket.layout, {kind: flats[kind] for kind in kinds if kind in flats}


def _scalars(optimizer: Optimizer, moments: bool) -> Iterator[tuple[BucketLayout, int, list[Part]]]:
    """Scalars of parameters: layouts, the parameter's number in the bucket, and parts of shape [1].

    Every rank with a part of a parameter has its scalars.
    """
    kinds = optimizer.rule.needs.scalars if moments else ()
    for bucket in optimizer.store.buckets if kinds else ():
        flats = optimizer.store.at_rest(bucket)
        for number, spec in enumerate(bucket.layout.specs if bucket.key.trainable else ()):
            name = spec.tied_with or spec.name
            scalars = [Part.whole(Key(name, kind), flats[kind][number : number + 1]) for kind in kinds]
            yield bucket.layout, number, scalars


def _writes(number: int, spec: ParamSpec, context: ParallelContext) -> bool:
    """Whether this rank, among those with equal copies, writes parameter `number` of a bucket."""
    own, copies = spec.copy(context.place)
    return spec.tied_with is None and number % copies == own


def _rows(
    layout: BucketLayout,
    spec: ParamSpec,
    flats: Mapping[str, Tensor],
    span: tuple[int, int],
    context: ParallelContext,
) -> Iterator[Part]:
    """This replica's rows of logical tensors [replicas, ...]."""
    for kind, flat in flats.items():
        for part in _slice_parts(spec, kind, flat[slice(*span)], 0, span[1] - span[0], context):
            box = Box((layout.rank, *part.box.offset), (1, *part.box.shape))
            yield Part(part.key, (layout.ranks, *part.shape), box, part.tensor.unsqueeze(0))


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
    """Elements `start` to `stop` of this rank's flattened slice, as boxes of the whole tensor."""
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
