"""Blends that change: no sample lost or repeated, whatever is edited, stopped, resumed and gone back on."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from megazero.data.blended import BlendedDataset
from megazero.data.build import planned_samples
from megazero.data.changing.blend import ChangingBlend
from megazero.data.changing.history import History, Segment, Share
from megazero.data.index_build import normalized
from tests.data.changing.shelf import Shelf, by_the_rule

Edits = list[tuple[int, dict[str, float]]]


def shares(weights: Mapping[str, float]) -> tuple[Share, ...]:
    return tuple(Share(source=name, path=name, weight=weight) for name, weight in weights.items())


def begun(weights: Mapping[str, float], samples: int) -> History:
    first = Segment(start=0, shares=shares(weights))
    planned = planned_samples(list(weights.values()), samples)[1]
    return History(samples=samples, planned=dict(zip(weights, planned, strict=True)), segments=(first,))


def order(blend: ChangingBlend, places: Sequence[int]) -> list[tuple[str, int]]:
    sources, owners, samples = blend.located(np.array(places))
    return [
        (sources[owner].name, sample) for owner, sample in zip(owners.tolist(), samples.tolist(), strict=True)
    ]


def drawn_edits(sources: int, count: int, rng: random.Random) -> Edits:
    """Six blends: the first, and five edits that pause, remove, return, add and reweigh sources."""
    starts = [0, *sorted(rng.sample(range(1, count), 5))]
    edits: Edits = []
    for start in starts:
        kept = rng.sample(range(sources), rng.randint(1, sources))
        edits.append((start, {f"s{n}": rng.choice([1.0, 0.3, 2.5, rng.random() + 0.01]) for n in kept}))
    return edits


@pytest.mark.parametrize(("sources", "seed"), [(3, 1), (30, 3)])
def test_edits_kills_and_batch_sizes_neither_repeat_nor_skip_a_sample(sources, seed):
    """A job takes over nothing but the history, as JSON; it ends anywhere, also right after an edit."""
    rng, count = random.Random(seed), 2000
    shelf = Shelf({f"s{n}": rng.choice([7, 40, 333]) for n in range(sources)})
    edits = drawn_edits(sources, count, rng)
    expected = by_the_rule(edits, count)
    history, at, waiting = begun(edits[0][1], 1000), 0, edits[1:]
    seen: list[tuple[str, int]] = []
    while at < count:
        blend = ChangingBlend(History.model_validate_json(history.model_dump_json()), shelf, count, at)
        stop, batch = min(count, at + rng.randint(1, 700)), rng.choice([1, 3, 8])
        while at < stop:
            if waiting and waiting[0][0] == at:
                blend.use(blend.edited(shares(waiting.pop(0)[1]), at, None), ())
            end = min(at + batch, stop, waiting[0][0] if waiting else count)
            seen += order(blend, range(at, end))
            at = end
        history = blend.history
    assert seen == expected
    numbers = defaultdict(list)
    for name, number in seen:
        numbers[name].append(number)
    assert all(own == list(range(len(own))) for own in numbers.values())
    assert [segment.start for segment in history.segments] == [start for start, _ in edits]
    unbroken = ChangingBlend(history, shelf, count)
    assert order(unbroken, range(count)) == expected
    content = unbroken.batch(range(count))["sample"]
    assert len(np.unique(content, axis=0)) == count


def test_before_an_edit_nothing_changes_and_going_back_finds_the_same():
    shelf = Shelf({"s0": 10, "s1": 10, "s2": 10})
    unedited = ChangingBlend(begun({"s0": 0.7, "s1": 0.3}, 200), shelf, 200)
    edited = ChangingBlend(begun({"s0": 0.7, "s1": 0.3}, 200), shelf, 200)
    plain = order(unedited, range(200))
    edited.use(edited.edited(shares({"s2": 1.0, "s0": 1.0}), 80, None), ())
    assert order(edited, range(80)) == plain[:80]
    after = order(edited, range(80, 200))
    assert {name for name, _ in after} == {"s0", "s2"}
    assert after[:4] == [("s2", 0), ("s0", 56), ("s2", 1), ("s0", 57)]
    assert order(edited, range(200)) == plain[:80] + after  # as after going back to an earlier sample
    # An edit after going back takes the place of what was to come.
    edited.use(edited.edited(shares({"s1": 1.0}), 50, None), ())
    assert [segment.start for segment in edited.history.segments] == [0, 50]
    assert order(edited, range(45, 53)) == [*plain[45:50], ("s1", 15), ("s1", 16), ("s1", 17)]


def test_a_source_goes_on_in_epochs_of_its_own_and_what_was_planned_is_never_built_again():
    shelf = Shelf({"s0": 30, "s1": 5})
    blend = ChangingBlend(begun({"s0": 1.0}, 40), shelf, 500)
    assert shelf.made == [("s0", None)]
    blend.use(blend.edited(shares({"s0": 1.0, "s1": 1.0}), 40, None), ())
    content = blend.batch(range(40, 100))["sample"].tolist()
    own = [row[1:] for row in content if row[0] == 0]
    # 60 were built for 41, and 40 of them were taken.
    assert own == [[0, 40 + n] for n in range(20)] + [[1, n] for n in range(10)]
    new = [row[1:] for row in content if row[0] == 1]
    assert new == [[epoch, n] for epoch in range(6) for n in range(5)]
    assert shelf.made.count(("s0", None)) == 1
    assert blend.batch([45])["dataset_id"].tolist() in ([0], [1])


def test_a_resume_opens_only_what_is_still_read():
    shelf = Shelf({"s0": 30, "s1": 30, "s2": 30})
    blend = ChangingBlend(begun({"s0": 1.0, "s1": 1.0}, 100), shelf, 100)
    blend.use(blend.edited(shares({"s1": 1.0, "s2": 1.0}), 40, None), ())
    later = Shelf({"s1": 30, "s2": 30})  # the files of the first are gone
    resumed = ChangingBlend(blend.history, later, 100, position=60)
    assert order(resumed, range(60, 100)) == order(blend, range(60, 100))
    assert resumed.batch(range(60, 100))["sample"].tolist() == blend.batch(range(60, 100))["sample"].tolist()
    assert [source.name for source in resumed.datasets] == ["s1", "s2"]


def test_what_cannot_be_opened_changes_nothing():
    blend = ChangingBlend(begun({"s0": 1.0}, 100), Shelf({"s0": 10}), 100)
    before = blend.history
    with pytest.raises(KeyError):
        blend.edited(shares({"s0": 1.0, "s9": 1.0}), 10, None)
    assert blend.history is before
    assert order(blend, [20]) == [("s0", 20)]


def test_the_first_segment_is_the_plain_blend_whoever_works_it_out():
    """A resume that goes back into it has no cached index."""
    rng = random.Random(7)
    for count in (2, 3, 7, 30):
        weights = {f"s{n}": rng.choice([0.1, 0.3, 1 / 3, rng.random()]) for n in range(count)}
        shelf = Shelf(dict.fromkeys(weights, 50))
        history = begun(weights, 400)
        parts = [shelf.make(name, history.planned[name], None) for name in weights]
        plain = BlendedDataset(parts, normalized(list(weights.values())).tolist(), 400)
        blend = ChangingBlend(history, shelf, 400)
        _, owners, samples = blend.located(np.arange(400))
        assert owners.tolist() == plain.dataset_index.tolist()
        assert samples.tolist() == plain.sample_index.tolist()


def test_a_history_is_looked_at():
    good = begun({"s0": 1.0}, 10).model_dump()
    second = {**good["segments"][0], "start": 5}
    assert len(History(**{**good, "segments": (*good["segments"], second)}).segments) == 2
    for wrong in (
        {"segments": (second,)},
        {"segments": (*good["segments"], second, second)},
        {"segments": ()},
        {"planned": {}},
        {"samples": 0},
    ):
        with pytest.raises(ValueError, match="segments|planned|samples"):
            History(**{**good, **wrong})


def test_a_change_is_described():
    blend = ChangingBlend(begun({"s0": 3.0, "s1": 1.0}, 100), Shelf({"s0": 10, "s1": 9, "s2": 9}), 100)
    assert blend.notes == ()
    blend.use(blend.edited(shares({"s0": 1.0, "s2": 1.0}), 40, None), ())
    assert blend.notes[-1] == (
        "the blend acts from sample 40 on: s0 75% -> 50% (30 samples so far), s2 0% -> 50% (0 samples so "
        "far), s1 25% -> 0% (10 samples so far)"
    )
