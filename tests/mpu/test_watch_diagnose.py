"""The diagnosis on literal logs."""

from __future__ import annotations

from dataclasses import replace

from megazero.mpu.watch.diagnose import Finding, FindingKind, diagnose, render
from megazero.mpu.watch.report import (
    Alarm,
    CallPlace,
    CallRecord,
    CallState,
    ChannelRecord,
    Operation,
    Report,
)
from tests.tables import over_table

GROUPS = {"tp": (0, 1), "dp": (0, 2), "world": (0, 1, 2), "0>1": (0, 1)}


def report(
    rank: int,
    log: str,
    *,
    alarm: Alarm = Alarm.TIMEOUT,
    error: str = "",
    alive: bool = True,
    stack: tuple[str, ...] = ("train.py:7 in step",),
) -> Report:
    """A report from a log such as ``tp reduce 4 a.py:1; world barrier - b.py:2 waited``.

    Each call is group, operation, shape (- for none), site and perhaps a state; a call starts one second
    after the one before it.
    """
    calls, counts = [], dict.fromkeys(GROUPS, 0)
    for serial, text in enumerate((part.split() for part in log.split(";") if part.strip()), 1):
        channel, what, sizes, site, *state = text
        counts[channel] += 1
        sizes = "" if sizes == "-" else f"[{sizes}] float32"
        state = CallState(state[0]) if state else CallState.DONE
        calls.append(
            CallRecord(
                serial,
                channel,
                counts[channel],
                Operation(what, sizes),
                CallPlace(site, ""),
                float(serial),
                state,
            )
        )
    channels = {name: ChannelRecord(f"group `{name}`", GROUPS[name], counts[name]) for name in GROUPS}
    channels = {key: channel for key, channel in channels.items() if rank in channel.members} if alive else {}
    return Report(rank, "host", 0.0, alarm, error, channels, tuple(calls), stack, alive)


def findings(*reports: Report, world_size: int | None = None) -> list[Finding]:
    by_rank = {each.rank: each for each in reports}
    return list(diagnose(by_rank, world_size or len(reports), grace=5.0).findings)


def test_another_operation_is_named_by_majority():
    (found,) = findings(
        report(0, "world reduce 4 a.py:1; world reduce 8 a.py:2 waited"),
        report(1, "world reduce 4 a.py:1; world gather 8 a.py:3 waited"),
        report(2, "world reduce 4 a.py:1; world reduce 8 a.py:2 waited"),
    )
    assert found == Finding(
        FindingKind.DIVERGED,
        (1,),
        "rank 1 diverged at call 2 of group `world`: rank 1 made gather [8] float32 at a.py:3; "
        "ranks 0, 2 made reduce [8] float32 at a.py:2",
    )


def test_another_shape_is_named_also_when_its_rank_went_on():
    (found,) = findings(
        report(0, "world reduce 4 a.py:1 waited"),
        report(1, "world reduce 4 a.py:1 waited"),
        report(2, "world reduce 5 a.py:1; world barrier - a.py:9 waited"),
    )
    assert found.ranks == (2,)
    assert "rank 2 diverged at call 1 of group `world`: rank 2 made reduce [5] float32" in found.text


def test_a_tie_accuses_both():
    (found,) = findings(report(0, "tp reduce 4 a.py:1 waited"), report(1, "tp reduce 5 a.py:1 waited"))
    assert found.ranks == (0, 1)
    assert found.text.startswith("ranks 0, 1 differ at call 1 of group `tp`: rank 0 made reduce [4]")


def test_call_sites_that_part_before_the_calls_differ_are_told():
    (found,) = findings(
        report(
            0, "world reduce 4 a.py:1; world reduce 4 a.py:2; world reduce 4 a.py:3; world reduce 9 a.py:4"
        ),
        report(
            1, "world reduce 4 a.py:1; world reduce 4 a.py:3; world reduce 4 a.py:3; world barrier - a.py:5"
        ),
        report(
            2, "world reduce 4 a.py:1; world reduce 4 a.py:2; world reduce 4 a.py:2; world reduce 9 a.py:4"
        ),
    )
    assert "rank 1 diverged at call 4" in found.text
    # Rank 1 left out the reduce of line 2, which nobody could see in the shapes.
    assert found.text.endswith(
        "the call sites part before, at call 2: rank 0 at a.py:2; rank 1 at a.py:3; rank 2 at a.py:2"
    )


def test_sites_that_always_differ_are_not_told():
    (found,) = findings(
        report(0, "tp reduce 4 a.py:1; tp reduce 4 a.py:1; tp reduce 9 a.py:1"),
        report(1, "tp reduce 4 b.py:1; tp reduce 4 b.py:1; tp reduce 8 b.py:1"),
    )
    assert "part before" not in found.text


def test_of_several_groups_the_one_that_differs_earliest_comes_first():
    first, second = findings(
        report(0, "tp reduce 4 a.py:1; dp reduce 4 a.py:2; tp reduce 4 a.py:3"),
        report(1, "tp reduce 4 a.py:1; tp barrier - a.py:5"),
        report(2, "dp reduce 7 a.py:2"),
    )
    assert "call 1 of group `dp`" in first.text
    assert "call 2 of group `tp`" in second.text


def test_a_message_and_its_receive_agree_on_their_sizes_alone():
    assert (
        findings(report(0, "0>1 send 4 a.py:1"), report(1, "0>1 recv 4 b.py:1"))[0].kind is FindingKind.STUCK
    )
    (found,) = findings(report(0, "0>1 send 4 a.py:1"), report(1, "0>1 recv 5 b.py:1 waited"))
    assert (found.kind, found.ranks) == (FindingKind.DIVERGED, (0, 1))


def test_who_never_came_is_named_with_what_it_does():
    (found,) = findings(
        report(0, "world reduce 4 a.py:1; world reduce 8 a.py:2 waited"),
        report(
            1, "world reduce 4 a.py:1", alarm=Alarm.TOLD, stack=("main.py:1 in main", "data.py:5 in read")
        ),
        report(2, "world reduce 4 a.py:1; world reduce 8 a.py:2 waited"),
    )
    assert found == Finding(
        FindingKind.MISSING,
        (1,),
        "rank 1 never came to call 2 of group `world`, reduce [8] float32 at a.py:2, where ranks 0, 2 wait; "
        "rank 1: outside any call, at data.py:5 in read; its log ends after call 1 of group `world`: "
        "reduce [4] float32 at a.py:1",
    )


def test_who_is_held_up_by_another_is_not_accused():
    """Rank 2 waits for rank 0, which waits for rank 1, which does something else."""
    (found,) = findings(
        report(0, "tp reduce 4 a.py:1 waited"),
        report(1, "", alarm=Alarm.TOLD),
        report(2, "dp reduce 4 a.py:2 waited"),
    )
    assert found.ranks == (1,)


def test_ranks_that_wait_for_each_other_are_all_accused():
    found = findings(
        report(0, "tp reduce 4 a.py:1 waited"),
        report(1, "world barrier - a.py:2 waited"),
        report(2, "world barrier - a.py:2 waited"),
    )
    assert [each.ranks for each in found] == [(1,), (0,)]


def test_a_rank_without_a_report_is_gone_and_nobody_else_is_accused():
    (found,) = findings(
        report(0, "world barrier - a.py:1 waited"), report(1, "", alarm=Alarm.TOLD), world_size=3
    )
    assert found == Finding(
        FindingKind.GONE, (2,), "rank 2 is gone: no report within 5 s (dead, frozen or out of reach)"
    )


def test_the_log_of_a_dead_rank_counts():
    diverged, gone = findings(
        report(0, "tp reduce 4 a.py:1 waited"), report(1, "tp reduce 5 a.py:1 waited", alive=False)
    )
    assert (diverged.kind, gone.kind, gone.ranks) == (FindingKind.DIVERGED, FindingKind.GONE, (1,))
    assert gone.text.endswith("its log ends in call 1 of group `tp`: reduce [5] float32 at a.py:1")


def test_an_error_is_the_cause_of_its_rank_and_not_of_those_who_wait():
    (found,) = findings(
        report(0, "world barrier - a.py:1 waited", alarm=Alarm.TOLD),
        report(1, "", alarm=Alarm.RAISED, error="DataError: torn"),
        report(2, "world barrier - a.py:1 waited", alarm=Alarm.COMMUNICATION, error="connection closed"),
    )
    assert found == Finding(FindingKind.RAISED, (1,), "rank 1 raised DataError: torn")


def test_one_error_on_all_ranks_is_told_once():
    (found,) = findings(*(report(r, "", alarm=Alarm.RAISED, error="ConfigError: bad") for r in range(3)))
    assert found.text == "ranks 0, 1, 2 raised ConfigError: bad"


def test_a_failed_call_is_told_when_nothing_else_explains_it():
    calls = "world barrier - a.py:1 waited"
    (found,) = findings(
        report(0, calls, alarm=Alarm.TOLD),
        report(1, calls, alarm=Alarm.COMMUNICATION, error="no route to host"),
        report(2, calls, alarm=Alarm.TOLD),
    )
    assert found == Finding(FindingKind.FAILED, (1,), "rank 1: no route to host")


def test_who_is_only_slower_than_a_call_that_failed_is_not_accused():
    (found,) = findings(
        report(0, "tp reduce 4 a.py:1 waited", alarm=Alarm.COMMUNICATION, error="connection reset"),
        report(1, "", alarm=Alarm.TOLD),
    )
    assert (found.kind, found.ranks) == (FindingKind.FAILED, (0,))


def test_ranks_that_agree_are_stuck():
    calls = "tp barrier - a.py:1 waited"
    (found,) = findings(report(0, calls, error="barrier took more than 3 s"), report(1, calls))
    assert found.kind is FindingKind.STUCK
    assert "all ranks agree" in found.text


def test_the_page_of_a_large_job_stays_short():
    size = 500
    reports = {r: report(r, "world barrier - a.py:1 waited") for r in range(3, size)}
    page = render(diagnose(reports, size), reports, size)
    assert "497 of 500 ranks reported" in page
    assert "ranks 0, 1, 2 are gone" in page
    assert "ranks 3, 4, 5, 6, 7, 8, 9 ... 499, 497 in all: in call 1 of group `world`" in page
    assert len(page.splitlines()) < 10


def test_a_report_survives_its_journey():
    original = report(1, "tp reduce 4 a.py:1; world barrier - b.py:2 waited", error="é")
    assert Report.from_json(original.to_json()) == original


def test_a_rank_without_a_sign_of_life_comes_before_those_that_wait_for_it():
    reports = {
        0: report(0, "world reduce 4 a.py:1 waited", alarm=Alarm.STILL, error="rank 1 stands still"),
        1: report(1, "", alive=False),
        2: report(2, "world reduce 4 a.py:1 waited", alarm=Alarm.TOLD),
    }
    (found,) = diagnose(reports, 3, still={1: "rank 1 stands still"}).findings
    assert found == Finding(FindingKind.STILL, (1,), "rank 1 stands still; its log ends before any call")
    (found,) = diagnose({k: reports[k] for k in (0, 2)}, 3, still={1: "rank 1 stands still"}).findings
    assert found == Finding(FindingKind.STILL, (1,), "rank 1 stands still")


def test_a_rank_that_was_still_and_goes_on_is_named_all_the_same():
    reports = {0: report(0, "", alarm=Alarm.STILL), 1: report(1, "", alarm=Alarm.TOLD)}
    (found,) = diagnose(reports, 2, still={1: "rank 1 stands still"}).findings
    assert found.text == "rank 1 stands still; it has gone on since"


def test_a_call_that_has_returned_counts_as_waited_for_and_is_told_with_the_place_of_the_host():
    """Over NCCL the host goes on, and only the device waits."""
    stuck = "tp reduce 4 a.py:1; tp reduce 8 a.py:2 returned; dp gather 2 a.py:3 returned"
    reports = [
        report(0, stuck, error="reduce took more than 600 s on the device"),
        report(1, "tp reduce 4 a.py:1", alarm=Alarm.TOLD, stack=("data.py:9 in read",)),
        report(2, "dp gather 2 a.py:3 returned", alarm=Alarm.TOLD),
    ]
    by_rank = {each.rank: each for each in reports}
    diagnosis = diagnose(by_rank, 3, grace=5.0)
    assert [found.ranks for found in diagnosis.findings] == [(1,)]
    assert diagnosis.summary == (
        "rank 1 never came to call 2 of group `tp`, reduce [8] float32 at a.py:2, where rank 0 waits; rank "
        "1: outside any call, at data.py:9 in read; its log ends after call 1 of group `tp`: reduce [4] "
        "float32 at a.py:1"
    )
    assert (
        "    rank 0: on the device, in call 2 of group `tp`: reduce [8] float32 at a.py:2 [reduce took more "
        "than 600 s on the device]; its main thread is at train.py:7 in step\n"
    ) in render(diagnosis, by_rank, 3)


def test_a_rank_that_died_had_gone_on_from_a_call_that_has_returned():
    (found,) = findings(
        report(0, "world reduce 4 a.py:1; world reduce 8 a.py:2 waited"),
        report(1, "world reduce 4 a.py:1 returned", alive=False),
        world_size=2,
    )
    assert found.text.endswith("its log ends after call 1 of group `world`: reduce [4] float32 at a.py:1")


@over_table("members", [range(16384), range(5, 1000, 8), (0, 1, 4)])
def test_a_report_says_who_is_in_a_channel_in_few_words(members):
    """Reports of 16,384 ranks once had all members of each channel in them."""
    said = replace(report(0, "world barrier - a.py:1 waited"), channels={"c": ChannelRecord("c", members, 3)})
    text = said.to_json()
    assert Report.from_json(text) == said
    assert len(text) < 800
