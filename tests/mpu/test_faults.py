"""Jobs in which a rank dies, raises, or makes another call than the others: all end, and name who did it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from megazero.mpu.watch.watch import EXIT_STATUS

pytestmark = pytest.mark.gloo

ROOT = Path(__file__).parents[2]
SCRIPT = "tests/mpu/fault_ranks.py"
LIMIT = 20.0


@dataclass(frozen=True)
class Outcome:
    """How the ranks of one scenario ended: status, seconds and what they wrote, by rank."""

    statuses: tuple[int, ...]
    seconds: tuple[float, ...]
    said: tuple[str, ...]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> dict[str, Outcome]:
    """All scenarios, run at once."""
    return run(tmp_path_factory.mktemp("faults"))


def run(folder: Path, *kind: str) -> dict[str, Outcome]:
    logs = folder / "logs"
    logs.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TMPDIR": str(logs)}
    command = [sys.executable, str(ROOT / SCRIPT), str(folder), *kind]
    subprocess.run(command, env=environment, cwd=ROOT, check=True, timeout=90)
    outcomes = {}
    for name, ends in json.loads((folder / "results.json").read_text()).items():
        said = tuple((folder / f"{name}.{rank}").read_text() for rank in range(len(ends)))
        assert None not in ends, f"a rank of {name} hung: {said[ends.index(None)]}"
        outcomes[name] = Outcome(*zip(*ends, strict=True), said)
    outcomes["logs left"] = [path.name for path in logs.iterdir()]
    return outcomes


def site(text: str, nth: int = 0) -> str:
    """Where the script has its nth line that contains `text`."""
    lines = (ROOT / SCRIPT).read_text(encoding="utf-8").splitlines()
    numbers = [number for number, line in enumerate(lines, 1) if text in line]
    return f"{SCRIPT}:{numbers[nth]}"


FAULTS = (
    *("skip", "shape", "killed", "killed_with_the_store", "raises", "raises_and_tells_nobody", "sleeps"),
    *("sends_nothing", "compared", "stuck_on_a_device", "stuck_on_a_device_async"),
)


def test_a_sound_job_ends_in_silence(outcomes):
    for name in ("fine", "fine_on_a_device"):
        assert outcomes[name].statuses == (0, 0, 0)
        assert outcomes[name].said == ("", "", "")


@pytest.mark.parametrize("name", FAULTS)
def test_every_rank_of_a_failed_job_ends_with_an_error_in_time(outcomes, name):
    assert 0 not in outcomes[name].statuses
    assert max(outcomes[name].seconds) < LIMIT


@pytest.mark.parametrize("name", [name for name in FAULTS if name != "killed_with_the_store"])
def test_one_rank_prints_the_whole_and_the_others_its_first_finding(outcomes, name):
    said = outcomes[name].said
    assert sum(text.count("ranks reported") for text in said) == 1
    first = re.search(r"^  \* (.*)$", said[0], re.MULTILINE)[1]
    for text, status in zip(said[1:], outcomes[name].statuses[1:], strict=True):
        ended_by_signal = status < 0
        assert ended_by_signal or f"ends with its job: {first}" in text


def test_a_skipped_call_names_rank_call_and_sites(outcomes):
    assert (
        f"rank 1 diverged at call 2 of group `tp` (ranks 0, 1, 2): rank 1 made barrier at "
        f"{site('group.barrier()')}; ranks 0, 2 made all_reduce(sum) [8] float32 at "
        f"{site('group.all_reduce(torch.zeros(8))')}"
    ) in outcomes["skip"].said[0]
    # All main threads are stuck inside Gloo: one process is ended, which may free the others.
    assert EXIT_STATUS in outcomes["skip"].statuses


def test_another_shape_is_named_though_gloo_aborts_a_rank_that_did_nothing_wrong(outcomes):
    place = site("900_000")
    assert (
        f"rank 2 diverged at call 2 of group `tp` (ranks 0, 1, 2): rank 2 made all_reduce(sum) [900000] "
        f"float32 at {place}; ranks 0, 1 made all_reduce(sum) [4] float32 at {place}"
    ) in outcomes["shape"].said[0]
    assert outcomes["shape"].statuses[1] == -signal.SIGABRT
    assert (
        "rank 1 is gone: its process has ended; its log ends in call 2 of group `tp`"
        in outcomes["shape"].said[0]
    )


def test_a_killed_rank_is_gone(outcomes):
    assert outcomes["killed"].statuses[1] == -signal.SIGKILL
    assert (
        "  * rank 1 is gone: its process has ended; its log ends after call 1 of group `tp`: "
        "all_reduce(sum) [4] float32 at "
    ) in outcomes["killed"].said[0]


def test_without_the_store_each_rank_says_what_it_knows(outcomes):
    for text in outcomes["killed_with_the_store"].said[1:]:
        assert "key-value store, which the launcher or rank 0 keeps, is out of reach" in text
        assert "in call 2 of group `tp` (ranks 0, 1, 2): all_reduce(sum) [8] float32" in text


def test_an_error_on_one_rank_is_told_to_the_others_before_any_timeout(outcomes):
    assert outcomes["raises"].statuses[2] == 1
    assert "  * rank 2 raised DataError: `corpus.bin` must hold 10 tokens" in outcomes["raises"].said[0]
    assert "took more than" not in "".join(outcomes["raises"].said)


def test_an_error_that_nobody_caught_is_told_at_exit(outcomes):
    assert outcomes["raises_and_tells_nobody"].statuses[1] == 1
    assert "  * rank 1 raised ZeroDivisionError: of rank 1" in outcomes["raises_and_tells_nobody"].said[0]


def test_a_rank_that_never_comes_is_named_with_what_it_does_instead(outcomes):
    said = outcomes["sleeps"].said[0]
    assert (
        "  * rank 1 never came to call 2 of group `tp` (ranks 0, 1, 2), all_reduce(sum) [8] float32 at "
        in said
    )
    assert f"where ranks 0, 2 wait; rank 1: outside any call, at {site('time.sleep(60)')} in sleeps" in said


@pytest.mark.parametrize("name", ["stuck_on_a_device", "stuck_on_a_device_async"])
def test_a_call_that_has_returned_and_stays_unfinished_on_the_device_is_named(outcomes, name):
    """A host that talks over NCCL goes on, and blocks in its next read from the device, outside of calls."""
    said = outcomes[name].said[0]
    call = "call 2 of group `tp` (ranks 0, 1, 2)"
    asked = site("group.all_reduce(torch.zeros(8), async_op=async_op)")
    # On a busy machine another rank may not have come yet, either, or have gone when the first one was late.
    asked_for = rf"{re.escape(call)}, all_reduce\(sum\) \[8\] float32 at {asked}"
    missing = rf"  \* ranks? (0, 1|1|1, 2) never came to {asked_for}"
    assert re.search(missing, said)
    assert re.search(rf"rank 1: outside any call, at {site('time.sleep(60)', 1)} in stuck", said)
    stand = rf"on the device, in {re.escape(call)}: all_reduce\(sum\) \[8\] float32 at {asked}.*"
    late = r" \[all_reduce\(sum\) took more than 3 s on the device\]"
    where = rf"its main thread is at {SCRIPT}:\d+ in tolist"
    assert re.search(rf"    ranks? [02, ]+: {stand}{late}; {where}", said), said
    assert "  NCCL's flight recorder is off: set TORCH_NCCL_DUMP_ON_TIMEOUT=1" in said
    # Nothing interrupts a read from the device, nor a sleep.
    assert EXIT_STATUS in outcomes[name].statuses


def test_a_message_that_is_never_sent_is_named(outcomes):
    assert (
        "rank 2 never came to call 1 of the messages from rank 2 to rank 0 (tag 5) over group `tp` "
        f"(ranks 0, 1, 2), recv [6] float32 at {site('tag=5')}, where rank 0 waits"
    ) in outcomes["sends_nothing"].said[0]


def test_comparing_calls_first_names_all_sites_and_raises_everywhere(outcomes):
    assert outcomes["compared"].statuses == (1, 1, 1)
    broadcast, reduce = site("group.broadcast("), site('torch.zeros(4), "max"')
    for rank, text in enumerate(outcomes["compared"].said):
        assert (
            f"rank 0 made broadcast(0) [4] float32 at {broadcast}; "
            f"ranks 1, 2 made all_reduce(max) [4] float32 at {reduce}"
        ) in text, rank


def test_logs_do_not_stay(outcomes):
    """But for a rank that died together with the store: nobody could be asked to speak for it."""
    assert len(outcomes["logs left"]) == 1
