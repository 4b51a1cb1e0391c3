"""What repetition shows: every kind of evidence, by hand."""

from __future__ import annotations

import pytest

from megazero.train.guards.rerun import Cause, PassResults, rule

NAMES = ("the sum of the lm loss", "gradients from `a` on")


def passes(*changes: dict, size: int = 3) -> list[PassResults]:
    """The passes of ranks that each borrow the next one's work, with some of them changed."""
    found = []
    for rank in range(size):
        neighbour = (rank + 1) % size
        plain = {
            "first": (rank, 7),
            "again": (rank, 7),
            "sums": (("1.0", "2.0"), ("1.0", "2.0")),
            "lent": (neighbour, 7),
            "neighbour": neighbour,
        }
        mine = next((each for each in changes if each["rank"] == rank), {})
        found.append(PassResults(NAMES, **{**plain, **{k: v for k, v in mine.items() if k != "rank"}}))
    return found


def test_what_comes_out_the_same_everywhere_is_no_fault_of_a_machine():
    ruling = rule(passes())
    assert (ruling.cause, ruling.ranks) == (Cause.REPEATABLE, ())
    assert ruling.text == (
        "it came out the same on the same and on other ranks: the data or the code is the cause"
    )


def test_without_a_neighbour_less_is_known():
    each = PassResults(NAMES, (1, 2), (1, 2))
    assert rule([each]).text.startswith("it came out the same on the same ranks:")


def test_a_rank_that_changes_its_mind_has_failed_once():
    ruling = rule(passes({"rank": 1, "first": (1, 8)}))
    assert (ruling.cause, ruling.ranks) == (Cause.TRANSIENT, (1,))
    assert ruling.text == (
        "rank 1 computed something else the second time (gradients from `a` on): a machine failed once"
    )


def test_a_rank_that_differs_from_both_neighbours_is_the_faulty_one():
    """Rank 2 computes 9 where all others compute 7: its own work, and that of rank 0."""
    ruling = rule(passes({"rank": 2, "first": (2, 9), "again": (2, 9), "lent": (0, 9)}))
    assert (ruling.cause, ruling.ranks) == (Cause.PERSISTENT, (2,))
    assert "rank 2 computes something else than other ranks" in ruling.text


def test_of_two_ranks_either_may_be_the_faulty_one():
    wrong = {"rank": 1, "first": (1, 9), "again": (1, 9), "lent": (0, 9)}
    assert rule(passes(wrong, size=2)).ranks == (0, 1)


def test_sums_that_change_alone_point_to_the_network():
    changed = (("1.0", "5.0"), ("1.0", "2.0"))
    ruling = rule(passes(*({"rank": r, "sums": changed} for r in range(3))))
    assert (ruling.cause, ruling.ranks) == (Cause.TRANSIENT, ())
    assert "the network or a buffer failed once" in ruling.text


@pytest.mark.parametrize("longer", [(1, 7, 7), (1,)])
def test_another_number_of_gradients_is_a_difference(longer):
    names = (*NAMES, "gradients from `b` on")
    assert rule([PassResults(names, (1, 7), longer)]).cause is Cause.TRANSIENT
