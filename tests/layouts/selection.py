"""Layouts of small models: all that could be, and selections that the rules allow."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields, replace
from functools import cache, reduce
from heapq import heapify, heappop, heapreplace
from itertools import cycle, islice, product
from operator import or_

from megazero.config.tree.optimizer import OptimizerName
from tests.layouts.layout import (
    ATTENDS,
    DECODERS,
    DRAWN_EXPERTS,
    ENCODERS,
    GLOBAL_BATCH,
    LATENT,
    METHODS,
    PAIRS,
    STORES,
    Dispatcher,
    Layout,
    Recompute,
    Schedule,
    Stage,
)
from tests.layouts.variants import VARIANTS

_SCHEDULES: tuple[tuple[Schedule, int], ...] = (
    ("gpipe", 1),
    ("1f1b", 1),
    ("interleaved", 2),
    ("zb-h1", 1),
    ("zb-v", 1),
)
_STAGES: tuple[Stage, ...] = (0, 1, 2, 3)
_RECOMPUTES: tuple[Recompute, ...] = ("none", "full", "selective")
_OPTIMIZERS: tuple[OptimizerName, ...] = ("adam", "lamb")
_COMMS = ("p2p", "p2p", "a2a", "all_gather", "a2a+p2p", "mixed")
_DISPATCHERS: tuple[Dispatcher, ...] = ("alltoall", "alltoall", "allgather")


@cache
def allowed(layout: Layout) -> bool:
    """Whether a layout breaks no rule."""
    return not layout.broken_rules()


def candidates(most_ranks: int = 8) -> Iterator[Layout]:
    """Every distinct layout of a decoder on at most `most_ranks` ranks, whether the rules allow it or not."""
    sizes = [
        (tp, pp, dp)
        for tp, pp, dp in product((1, 2, 4, 8), repeat=3)
        if pp < 8 and tp * pp * dp <= most_ranks
    ]
    for (tp, pp, dp), (schedule, virtual), zero in product(sizes, _SCHEDULES, _STAGES):
        if pp == 1 and schedule in ("gpipe", "interleaved"):
            continue
        chunks = pp * (2 if schedule in ("interleaved", "zb-v") else 1)
        for rest in product((False, True), _RECOMPUTES, (1, 2), (False, True), DECODERS, (False, True)):
            sequence_parallel, recompute, micro_batch, keep, shape, untied = rest
            if (sequence_parallel and tp == 1) or (keep and zero < 3):
                continue
            yield Layout(
                tp=tp,
                pp=pp,
                dp=dp,
                schedule=schedule,
                virtual=virtual,
                zero=zero,
                sequence_parallel=sequence_parallel,
                recompute=recompute,
                micro_batch=micro_batch,
                keep=keep,
                shape=shape,
                untied=untied,
                layers=max(2, chunks),
            )


def _drawn(
    draw: Callable[[random.Random], Layout],
    most_ranks: int,
    count: int,
    seed: int,
    *also: Callable[[Layout], bool],
) -> list[Layout]:
    """`count` distinct layouts on at most `most_ranks` ranks, drawn until there are as many.

    Left out are schedules and shared rows that one rank cannot have, and what `also` does not hold for.
    """
    dice, drawn = random.Random(seed), dict[Layout, None]()
    while len(drawn) < count:
        layout = draw(dice)
        staged = layout.pp > 1 or layout.schedule not in ("gpipe", "interleaved")
        sliced = layout.tp > 1 or not layout.sequence_parallel
        if staged and sliced and layout.world_size <= most_ranks and all(holds(layout) for holds in also):
            drawn[layout] = None
    return list(drawn)


def _is_quick(layout: Layout) -> bool:
    """Many ranks and many micro-batches take long and show no more together."""
    interleaved = layout.schedule == "interleaved"
    needed = GLOBAL_BATCH if layout.world_size <= 2 else layout.pp if interleaved else 2
    return layout.dp * layout.micro_batch * needed >= GLOBAL_BATCH


def _experts_fit(layout: Layout) -> bool:
    """The ranks of the replicas divide by those that share experts."""
    return layout.tp * layout.dp % (layout.ep * (layout.etp or layout.tp)) == 0


def encoder_layouts(most_ranks: int = 8, count: int = 1200, seed: int = 1) -> list[Layout]:
    """`count` distinct layouts of an encoder on at most `most_ranks` ranks, allowed or not.

    There are too many to list.
    """

    def draw(dice: random.Random) -> Layout:
        schedule, virtual = dice.choice(_SCHEDULES)
        pp = dice.choice((1, 2, 4))
        chunks = pp * (2 if schedule in ("interleaved", "zb-v") else 1)
        dropout, packed = dice.choice(((0.0, False), (0.1, False), (0.0, True), (0.1, True)))
        return Layout(
            tp=dice.choice((1, 2, 4)),
            pp=pp,
            dp=dice.choice((1, 2)),
            schedule=schedule,
            virtual=virtual,
            zero=dice.choice(_STAGES),
            sequence_parallel=dice.choice((False, True)),
            recompute=dice.choice(_RECOMPUTES),
            micro_batch=dice.choice((1, 2, 4)),
            shape=dice.choice(ENCODERS),
            untied=dice.choice((False, True)),
            binary_head=dice.choice((False, True)),
            optimizer=dice.choice(_OPTIMIZERS),
            layers=max(2, chunks),
            dropout=dropout,
            packed=packed,
        )

    return _drawn(draw, most_ranks, count, seed, _is_quick)


def pair_layouts(most_ranks: int = 8, count: int = 1200, seed: int = 1) -> list[Layout]:
    """`count` distinct layouts of an encoder and a decoder, allowed or not."""

    def draw(dice: random.Random) -> Layout:
        schedule, virtual = dice.choice(_SCHEDULES)
        pp = dice.choice((1, 2, 4))
        chunks = pp * (2 if schedule in ("interleaved", "zb-v") else 1)
        return Layout(
            tp=dice.choice((1, 2, 4)),
            pp=pp,
            dp=dice.choice((1, 2)),
            schedule=schedule,
            virtual=virtual,
            zero=dice.choice(_STAGES),
            sequence_parallel=dice.choice((False, True)),
            recompute=dice.choice(_RECOMPUTES),
            micro_batch=dice.choice((1, 2, 4)),
            shape=dice.choice(PAIRS),
            untied=dice.choice((False, True)),
            optimizer=dice.choice(_OPTIMIZERS),
            layers=max(1, chunks // 2),  # of each of the two
            dropout=dice.choice((0.0, 0.1)),
        )

    return _drawn(draw, most_ranks, count, seed, _is_quick)


def context_layouts(most_ranks: int = 8, count: int = 2400, seed: int = 1) -> list[Layout]:
    """`count` distinct layouts whose sequences several ranks share, allowed or not."""

    def draw(dice: random.Random) -> Layout:
        schedule, virtual = dice.choice(_SCHEDULES)
        pp = dice.choice((1, 1, 2, 2, 4))
        chunks = pp * (2 if schedule in ("interleaved", "zb-v") else 1)
        shape = dice.choice((*DECODERS, *DECODERS, *ENCODERS))
        experts = dice.choice(("", "top2", "first-come", "shared"))
        cp = dice.choice((2, 2, 3, 4, 4))
        return Layout(
            tp=dice.choice((1, 1, 2, 4)),
            pp=pp,
            dp=dice.choice((1, 2)),
            schedule=schedule,
            virtual=virtual,
            zero=dice.choice(_STAGES),
            sequence_parallel=dice.choice((False, True)),
            recompute=dice.choice(_RECOMPUTES),
            micro_batch=dice.choice((1, 2)),
            shape=shape,
            layers=max(2, chunks),
            dropout=dice.choice((0.0, 0.1)),
            packed=shape in ENCODERS and dice.choice((False, True)),
            documents=shape in DECODERS and dice.choice((False, True)),
            experts=experts,
            ep=dice.choice((1, 2)) if experts else 1,
            cp=cp,
            comm=dice.choice(_COMMS),
            attends=dice.choice(("", *ATTENDS)),
            sequence=24 if cp == 3 else 16,
        )

    return _drawn(draw, most_ranks, count, seed)


def expert_layouts(most_ranks: int = 8, count: int = 1200, seed: int = 1) -> list[Layout]:
    """`count` distinct layouts with experts on at most `most_ranks` ranks, allowed or not."""

    def draw(dice: random.Random) -> Layout:
        schedule, virtual = dice.choice(_SCHEDULES)
        experts = dice.choice(DRAWN_EXPERTS)
        pp = dice.choice((1, 1, 2)) if experts == "pyramid" else dice.choice((1, 1, 2, 4))
        chunks = pp * (2 if schedule in ("interleaved", "zb-v") else 1)
        tp = dice.choice((1, 2, 4))
        return Layout(
            tp=tp,
            pp=pp,
            dp=dice.choice((1, 2, 4)),
            schedule=schedule,
            virtual=virtual,
            zero=dice.choice(_STAGES),
            sequence_parallel=dice.choice((False, True)),
            recompute=dice.choice(_RECOMPUTES),
            micro_batch=dice.choice((1, 2)),
            shape=dice.choice((*DECODERS, *DECODERS, *ENCODERS)),
            layers=4 if experts == "pyramid" else max(2, chunks),
            experts=experts,
            ep=dice.choice((1, 2, 4)),
            etp=dice.choice((0, 1, 2)),
            dispatcher=dice.choice(_DISPATCHERS),
        )

    return _drawn(draw, most_ranks, count, seed, _is_quick, _experts_fit)


def variant_layouts(most_ranks: int = 8, count: int = 2400, seed: int = 1) -> list[Layout]:
    """`count` distinct layouts whose layers are of a variant, allowed or not."""

    def draw(dice: random.Random) -> Layout:
        schedule, virtual = dice.choice(_SCHEDULES)
        pp = dice.choice((1, 1, 2, 2, 4))
        chunks = pp * (2 if schedule in ("interleaved", "zb-v") else 1)
        shape, cp = dice.choice((*DECODERS, *DECODERS, *ENCODERS)), dice.choice((1, 1, 2))
        experts = dice.choice(("", "", "top2", "shared"))
        return Layout(
            tp=dice.choice((1, 2, 4)),
            pp=pp,
            dp=dice.choice((1, 2)),
            schedule=schedule,
            virtual=virtual,
            zero=dice.choice(_STAGES),
            sequence_parallel=dice.choice((False, True)),
            recompute=dice.choice((*_RECOMPUTES, "parts")),
            micro_batch=dice.choice((1, 2)),
            shape=shape,
            untied=dice.choice((False, True)),
            layers=max(2, chunks),
            dropout=dice.choice((0.0, 0.1)),
            documents=shape in DECODERS and dice.choice((False, True)),
            experts=experts,
            ep=dice.choice((1, 2)) if experts else 1,
            cp=cp,
            comm=dice.choice(_COMMS) if cp > 1 else "p2p",
            variant=dice.choice(tuple(VARIANTS)[1:]),
        )

    return _drawn(draw, most_ranks, count, seed)


def latent_layouts(most_ranks: int = 8, count: int = 1600, seed: int = 1) -> list[Layout]:
    """`count` distinct layouts with latent attention, and further tokens or not, allowed or not."""

    def draw(dice: random.Random) -> Layout:
        schedule, virtual = dice.choice(_SCHEDULES)
        pp = dice.choice((1, 1, 2, 2, 4))
        chunks = pp * (2 if schedule in ("interleaved", "zb-v") else 1)
        experts = dice.choice(("", "", "biased", "shared", "first-come"))
        cp = dice.choice((1, 1, 1, 2))
        return Layout(
            tp=dice.choice((1, 1, 2, 4)),
            pp=pp,
            dp=dice.choice((1, 2)),
            schedule=schedule,
            virtual=virtual,
            zero=dice.choice(_STAGES),
            sequence_parallel=dice.choice((False, True)),
            recompute=dice.choice(_RECOMPUTES),
            micro_batch=dice.choice((1, 2)),
            shape=dice.choice(LATENT),
            untied=dice.choice((False, True)),
            layers=max(2, chunks),
            dropout=dice.choice((0.0, 0.1)),
            documents=dice.choice((False, True)),
            experts=experts,
            ep=dice.choice((1, 2)) if experts else 1,
            cp=cp,
            comm="p2p" if cp == 1 else dice.choice(_COMMS),
            attends=dice.choice(("", "", "window")),
        )

    return _drawn(draw, most_ranks, count, seed)


def hybrid_layouts(most_ranks: int = 4, count: int = 1200, seed: int = 1) -> list[Layout]:
    """`count` distinct layouts of hybrid models on at most `most_ranks` ranks, allowed or not."""

    def draw(dice: random.Random) -> Layout:
        schedule, virtual = dice.choice(_SCHEDULES)
        pp = dice.choice((1, 1, 2, 2, 4))
        chunks = pp * (2 if schedule in ("interleaved", "zb-v") else 1)
        letters = dice.choice(("M", "M-", "-M*", "MM*-", "ME*"))
        experts = dice.choice(("top2", "shared")) if "E" in letters else ""
        return Layout(
            tp=dice.choice((1, 2, 4)),
            pp=pp,
            dp=dice.choice((1, 2)),
            schedule=schedule,
            virtual=virtual,
            zero=dice.choice(_STAGES),
            sequence_parallel=dice.choice((False, True)),
            recompute=dice.choice(_RECOMPUTES),
            micro_batch=2,
            shape=DECODERS[len(letters) % 2],
            layers=max(len(letters), chunks),
            dropout=dice.choice((0.0, 0.1)),
            documents=dice.choice((False, True)),
            letters=letters,
            experts=experts,
            ep=dice.choice((1, 2)) if experts else 1,
        )

    return _drawn(draw, most_ranks, count, seed, _experts_fit)


def with_methods(layouts: Sequence[Layout], every: int = 4) -> list[Layout]:
    """The layouts; one in `every` also trains by a method, of those that the rules allow it the one that has
    met the fewest of its settings so far.
    """
    chosen = list(layouts)
    met: dict[str, set[tuple[str, object]]] = {name: set() for name in METHODS if name}
    for place in range(0, len(chosen), every):
        settings = set(vars(chosen[place]).items())
        for method in sorted(met, key=lambda name: len(met[name] & settings)):
            layout = replace(chosen[place], method=method)
            if allowed(layout):
                chosen[place] = layout
                met[method] |= settings
                break
    return chosen


def with_stores(layouts: Sequence[Layout]) -> list[Layout]:
    """The layouts; half of them keep their state elsewhere, in the stores by turns, and so does half of those
    with a method (every third or fourth).
    """
    stores = cycle(name for name in STORES if name)
    return [
        replace(layout, store=next(stores)) if (place + place // 4) % 2 else layout
        for place, layout in enumerate(layouts)
    ]


def work(layout: Layout) -> float:
    """Roughly the seconds of a processor that training a layout takes: its layers' runs on all its ranks."""
    stacks = 2 if layout.shape in PAIRS else 1
    runs = layout.tp * layout.cp * stacks * layout.layers * layout.samples / layout.micro_batch
    return 0.15 + 0.01 * layout.world_size + runs * (0.018 if layout.experts else 0.006)


def covering(
    layouts: Iterable[Layout],
    count: int,
    seed: int = 1,
    few_ranks: int = 4,
    allowed: Callable[[Layout], bool] = lambda layout: True,
) -> Iterator[Layout]:
    """`count` of the `layouts` that cover every pair of values of two settings that occurs in `layouts`.

    They are chosen greedily from a shuffled order (pairwise testing, Cohen et al. 1997), by the new pairs
    for the time that they take, then filled up in that order, starting with layouts of `few_ranks`, as four
    take a quarter of the time of eight. A layout is `allowed` or not when it is about to be chosen: to judge
    all of them would take longer than to choose. Who needs the first few takes no more of them.
    """
    shuffled = list(layouts)
    random.Random(seed).shuffle(shuffled)
    pairs_of = _pairs_as_bits(shuffled)
    pairs = [pairs_of(layout) for layout in shuffled]
    wanted, chosen = reduce(or_, pairs, 0), list[Layout]()
    # Gains only shrink: a layout whose gain of before is the largest, and stands, is the best of all.
    gains = [
        (-pairs[place].bit_count() / work(layout), place) for place, layout in enumerate(shuffled[:2400])
    ]
    heapify(gains)
    while wanted:
        while gains:
            _, place = gains[0]
            gain = (-(pairs[place] & wanted).bit_count() / work(shuffled[place]), place)
            if gain == gains[0]:
                break
            heapreplace(gains, gain)
        if not gains or not gains[0][0]:
            # Only rare pairs are left: take any layout that has one.
            rare = (place for place, has in enumerate(pairs) if has & wanted and allowed(shuffled[place]))
            place = next(rare, -1)
            if place < 0:
                break  # what is left is in no layout that is allowed
        elif not allowed(shuffled[place]):
            heappop(gains)
            continue
        yield shuffled[place]
        chosen.append(shuffled[place])
        wanted &= ~pairs[place]
    taken = set(chosen)
    rest = sorted((x for x in shuffled if x not in taken), key=lambda x: x.world_size > few_ranks)
    yield from islice(filter(allowed, rest), max(0, count - len(chosen)))


def _pairs_as_bits(layouts: Sequence[Layout]) -> Callable[[Layout], int]:
    """A function from one of these to its pairs of values, as a number with a bit for each pair.

    Each value has as many bits as there are values, for those of earlier settings that it meets.
    """
    columns = {f.name: {getattr(layout, f.name) for layout in layouts} for f in fields(Layout)}
    names = [name for name, values in columns.items() if len(values) > 1]
    places = {value: n for n, value in enumerate((name, value) for name in names for value in columns[name])}

    def pairs(layout: Layout) -> int:
        mine = [places[name, getattr(layout, name)] for name in names]
        met = pairs = 0
        for place in mine:
            pairs |= met << place * len(places)
            met |= 1 << place
        return pairs

    return pairs
