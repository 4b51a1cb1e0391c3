"""Jobs in which a rank is stopped: the others end and name it, and it ends when it goes on."""

from __future__ import annotations

import pytest

from megazero.mpu.watch.watch import EXIT_STATUS
from tests.mpu.fault_ranks import GRACE, HEARTBEAT
from tests.mpu.test_faults import Outcome, run

pytestmark = [pytest.mark.gloo, pytest.mark.slow]

LIMIT = 15.0
ENDED = (
    1,
    EXIT_STATUS,
)  # by an error of the main thread, or by the watch, as the main thread is stuck in Gloo


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> dict[str, Outcome]:
    return run(tmp_path_factory.mktemp("stopped"), "heartbeat")


def test_a_stopped_rank_is_named(outcomes):
    found = outcomes["stopped"]
    assert "  * rank 1 (" in found.said[0]
    assert "has given no sign of life for" in found.said[0]
    assert "it is stopped, dead or out of reach; its log ends after call 1 of group `tp`" in found.said[0]
    assert "megazero: rank 2 ends with its job: rank 1 (" in found.said[2]
    assert found.statuses[0] in ENDED
    assert found.statuses[2] in ENDED
    assert max(found.seconds[0], found.seconds[2]) < LIMIT


def test_a_stopped_rank_that_keeps_the_store_is_named_by_each_of_the_others(outcomes):
    found = outcomes["stopped_with_the_store"]
    for rank in (1, 2):
        assert (
            "rank 0 on this host, which keeps the job's key-value store, is stopped or out of reach: no "
            f"answer for {HEARTBEAT:.0f} s; rank {rank}: in call 2 of group `tp`"
        ) in found.said[rank]
        assert found.statuses[rank] in ENDED
        assert found.seconds[rank] < LIMIT


@pytest.mark.parametrize(("name", "rank"), [("stopped", 1), ("stopped_with_the_store", 0)])
def test_a_rank_that_goes_on_afterwards_ends_too(outcomes, name, rank):
    assert outcomes[name].statuses[rank] in ENDED
    assert outcomes[name].seconds[rank] < LIMIT + 3 * GRACE


def test_a_rank_that_leaves_early_is_not_missed(outcomes):
    """It was once: a rank that ends is as silent as one that is stopped."""
    assert outcomes["leaves_early"].statuses == (0, 0, 0)
    assert outcomes["leaves_early"].said == ("", "", "")
