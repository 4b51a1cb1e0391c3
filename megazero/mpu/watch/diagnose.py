"""The diagnosis of a failed job: a pure function from the processes' reports to the rank that diverged first.

There are three kinds of evidence, in this order: two members made different calls under one number; a process
raised an error or left no report; a member did not come in time to a call in which others wait. The last kind
is followed from those who wait to those they wait for (the wait-for graph of deadlock detection), so that
victims are not accused.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

from megazero.mpu.watch.report import Alarm, CallRecord, CallState, ChannelRecord, Report

_MOST_FINDINGS = 6
_MOST_STANDING = 16
_MOST_STACKS = 3
_MOST_FRAMES = 12
_MOST_RANKS = 8


class FindingKind(Enum):
    """The kind of evidence behind a finding."""

    DIVERGED = "diverged"
    RAISED = "raised"
    STILL = "still"
    GONE = "gone"
    MISSING = "missing"
    FAILED = "failed"
    STUCK = "stuck"


@dataclass(frozen=True)
class Finding:
    """One thing that went wrong: its kind, the world ranks that it accuses, and a sentence to print."""

    kind: FindingKind
    ranks: tuple[int, ...]
    text: str


@dataclass(frozen=True)
class Diagnosis:
    """All findings, the first cause first; there is always at least one."""

    findings: tuple[Finding, ...]

    @property
    def summary(self) -> str:
        """The first finding as one line."""
        return self.findings[0].text


def diagnose(
    reports: Mapping[int, Report],
    world_size: int,
    grace: float = 10.0,
    still: Mapping[int, str] = MappingProxyType({}),
) -> Diagnosis:
    """Say what went wrong in a job of `world_size` ranks, from the `reports` of the first `grace` seconds.

    Args:
        reports: by rank.
        world_size: number of ranks.
        grace: seconds.
        still: for each rank whose heartbeat stopped, a sentence that says so.
    """
    alive = {rank: report for rank, report in reports.items() if report.alive}
    gone = {rank: text for rank, text in still.items() if rank not in alive}
    findings = [*_diverged(reports), *_raised(alive), *_still(still, reports)]
    findings += _gone(reports, [rank for rank in range(world_size) if rank not in gone], grace)
    findings = findings or [*_missing(alive), *_failed(alive)] or _stuck(alive)
    return Diagnosis(tuple(findings))


def _channels(reports: Iterable[Report]) -> dict[str, ChannelRecord]:
    return {key: channel for report in reports for key, channel in report.channels.items()}


def _diverged(reports: Mapping[int, Report]) -> list[Finding]:
    """The first call number of each channel at which members made different calls, ordered by time."""
    channels = _channels(reports.values())
    by_number: dict[str, dict[int, dict[int, CallRecord]]] = defaultdict(lambda: defaultdict(dict))
    for rank, report in sorted(reports.items()):
        for call in report.calls:
            by_number[call.channel][call.sequence][rank] = call
    findings = []
    for key, numbers in by_number.items():
        for number in sorted(numbers):
            calls = numbers[number]
            if len({call.signature for call in calls.values()}) > 1:
                start = min(call.start for call in calls.values())
                label = channels[key].label if key in channels else key
                findings.append((start, _divergence(label, number, numbers)))
                break
    return [finding for _, finding in sorted(findings, key=lambda pair: pair[0])]


def _divergence(label: str, number: int, numbers: Mapping[int, Mapping[int, CallRecord]]) -> Finding:
    calls = numbers[number]
    camps: dict[str, list[int]] = defaultdict(list)
    for rank, call in calls.items():
        camps[call.signature].append(rank)
    ordered = sorted(camps.values(), key=lambda ranks: (len(ranks), ranks))
    tie = len(ordered[-1]) == len(ordered[-2])
    odd = sorted(rank for ranks in (ordered if tie else ordered[:-1]) for rank in ranks)
    versions = "; ".join(f"{_ranks(ranks)} made {_call(calls, ranks)}" for ranks in ordered)
    text = f"{_ranks(odd)} {'differ' if tie else 'diverged'} at call {number} of {label}: {versions}"
    hint = _parting(number, odd, numbers)
    return Finding(FindingKind.DIVERGED, tuple(odd), f"{text}{hint}")


def _call(calls: Mapping[int, CallRecord], ranks: Sequence[int]) -> str:
    places = list(dict.fromkeys(str(calls[rank].place) for rank in ranks))
    more = f" and {len(places) - 2} other places" if len(places) > 2 else ""
    return f"{calls[ranks[0]].operation} at {', '.join(places[:2])}{more}"


def _parting(number: int, odd: Collection[int], numbers: Mapping[int, Mapping[int, CallRecord]]) -> str:
    """The earlier call at which the odd ranks' call sites began to differ from the others', as text."""
    since = number
    while since > 1:
        sites = [
            {c.place.site for r, c in numbers.get(since - 1, {}).items() if (r in odd) is side}
            for side in (True, False)
        ]
        if not all(sites):
            return ""
        if sites[0] == sites[1]:
            break
        since -= 1
    if since in (1, number):
        return ""
    calls = numbers[since]
    places = "; ".join(f"rank {rank} at {calls[rank].place}" for rank in sorted(calls)[:_MOST_RANKS])
    return f"; the call sites part before, at call {since}: {places}"


def _raised(reports: Mapping[int, Report]) -> list[Finding]:
    by_error: dict[str, list[int]] = defaultdict(list)
    for rank, report in sorted(reports.items(), key=lambda item: item[1].time):
        if report.alarm is Alarm.RAISED:
            by_error[report.error].append(rank)
    return [
        Finding(FindingKind.RAISED, tuple(sorted(ranks)), f"{_ranks(sorted(ranks))} raised {error}")
        for error, ranks in by_error.items()
    ]


def _still(still: Mapping[int, str], reports: Mapping[int, Report]) -> list[Finding]:
    findings = []
    for rank, text in sorted(still.items()):
        report = reports.get(rank)
        if report is not None:
            text += "; it has gone on since" if report.alive else f"; its log ends {_last(report)}"
        findings.append(Finding(FindingKind.STILL, (rank,), text))
    return findings


def _gone(reports: Mapping[int, Report], expected: Sequence[int], grace: float) -> list[Finding]:
    findings = []
    silent = [rank for rank in expected if rank not in reports]
    if silent:
        verb = "is" if len(silent) == 1 else "are"
        text = f"{_ranks(silent)} {verb} gone: no report within {grace:g} s (dead, frozen or out of reach)"
        findings.append(Finding(FindingKind.GONE, tuple(silent), text))
    for rank, report in sorted(reports.items()):
        if not report.alive and rank in expected:
            why = report.error or f"no report within {grace:g} s"
            text = f"rank {rank} is gone: {why}; its log ends {_last(report)}"
            findings.append(Finding(FindingKind.GONE, (rank,), text))
    return findings


def _last(report: Report) -> str:
    if not report.calls:
        return "before any call"
    call = report.calls[-1]
    place = "after" if call.state in (CallState.DONE, CallState.RETURNED) else "in"
    return f"{place} {_spell(call, report)}"


def _spell(call: CallRecord, report: Report) -> str:
    channel = report.channels.get(call.channel)
    # For a dead process the calls are known, but its channels are not.
    label = f"group `{call.channel.partition('#')[0]}`" if channel is None else channel.label
    return f"call {call.sequence} of {label}: {call.operation} at {call.place}"


def _missing(reports: Mapping[int, Report]) -> list[Finding]:
    """Members that never came to a call in which others wait, unless they are held up by someone else."""
    if all(report.alarm is not Alarm.TIMEOUT for report in reports.values()):
        return []  # the absent members were given no time to come
    waits: dict[int, set[int]] = defaultdict(set)
    calls: dict[tuple[str, int], dict[int, CallRecord]] = defaultdict(dict)
    absent: dict[tuple[str, int], set[int]] = {}  # once for a call, however many ranks wait in it
    channels = _channels(reports.values())
    for rank, report in sorted(reports.items()):
        for call in report.calls:
            if call.state in (CallState.WAITED, CallState.RETURNED) and call.channel in channels:
                key = call.channel, call.sequence
                calls[key][rank] = call
                if key not in absent:
                    absent[key] = _absent(call, channels[call.channel].members, reports)
                waits[rank] |= absent[key]
    findings = []
    for (channel, number), waiting in calls.items():
        guilty = sorted(rank for rank in absent[channel, number] if _is_root(rank, waits))
        if guilty:
            start = min(call.start for call in waiting.values())
            findings.append((start, _absence(guilty, number, channels[channel].label, waiting, reports)))
    return [finding for _, finding in sorted(findings, key=lambda pair: pair[0])]


def _absent(call: CallRecord, members: Iterable[int], reports: Mapping[int, Report]) -> set[int]:
    """The members that have not begun `call`."""

    def count(rank: int) -> int:
        channel = reports[rank].channels.get(call.channel)
        return 0 if channel is None else channel.count

    return {rank for rank in members if rank in reports and count(rank) < call.sequence}


def _is_root(rank: int, waits: Mapping[int, set[int]]) -> bool:
    """Whether everyone that `rank` waits for, directly or not, waits for `rank` in turn."""
    return all(rank in _reach(other, waits) for other in _reach(rank, waits))


def _reach(rank: int, waits: Mapping[int, set[int]]) -> set[int]:
    seen: set[int] = set()
    ahead = list(waits.get(rank, ()))
    while ahead:
        rank = ahead.pop()
        if rank not in seen:
            seen.add(rank)
            ahead.extend(waits.get(rank, ()))
    return seen


def _absence(
    guilty: Sequence[int],
    number: int,
    label: str,
    waiting: Mapping[int, CallRecord],
    reports: Mapping[int, Report],
) -> Finding:
    ranks = list(waiting)
    text = (
        f"{_ranks(guilty)} never came to call {number} of {label}, {_call(waiting, ranks)}, "
        f"where {_ranks(ranks)} {'waits' if len(ranks) == 1 else 'wait'}"
    )
    instead = "; ".join(f"rank {rank}: {standing(reports[rank])}" for rank in guilty[:_MOST_STACKS])
    return Finding(FindingKind.MISSING, tuple(guilty), f"{text}; {instead}")


def _failed(reports: Mapping[int, Report]) -> list[Finding]:
    return [
        Finding(FindingKind.FAILED, (rank,), f"rank {rank}: {report.error}")
        for rank, report in sorted(reports.items(), key=lambda item: item[1].time)
        if report.alarm in (Alarm.COMMUNICATION, Alarm.NOTES)
    ]


def _stuck(reports: Mapping[int, Report]) -> list[Finding]:
    late = [rank for rank, report in sorted(reports.items()) if report.alarm is Alarm.TIMEOUT]
    reasons = "; ".join(reports[rank].error for rank in late[:_MOST_STACKS]) or "no rank says why"
    text = f"all ranks agree on their calls, and yet the job is stuck (is the network down?): {reasons}"
    return [Finding(FindingKind.STUCK, tuple(late), text)]


def standing(report: Report) -> str:
    """Say what a process is doing: the call it waits in, or where its main thread is."""
    if not report.alive:
        return f"gone; its log ends {_last(report)}"
    error = f" [{report.error}]" if report.error else ""
    where = f"at {report.stack[-1]}" if report.stack else "at an unknown place"
    returned = [call for call in report.calls if call.state is CallState.RETURNED]
    if returned:  # an earlier one than the one that the main thread may be in
        return f"on the device, in {_spell(returned[0], report)}{error}; its main thread is {where}"
    waited = [call for call in report.calls if call.state is CallState.WAITED]
    if waited:
        return f"in {_spell(waited[0], report)}{error}"
    raised = f", raised {report.error}" if report.error else ""
    return f"outside any call, {where}{raised}; its log ends {_last(report)}"


def render(diagnosis: Diagnosis, reports: Mapping[int, Report], world_size: int) -> str:
    """The diagnosis as a page: findings, where each rank stands, the stacks of those accused."""
    alive = sum(report.alive for report in reports.values())
    lines = [f"megazero: the job has failed; {alive} of {world_size} ranks reported."]
    lines += [f"  * {finding.text}" for finding in diagnosis.findings[:_MOST_FINDINGS]]
    if len(diagnosis.findings) > _MOST_FINDINGS:
        lines.append(f"  * and {len(diagnosis.findings) - _MOST_FINDINGS} more")
    lines.append("  Where the ranks stood:")
    standings: dict[str, list[int]] = defaultdict(list)
    for rank, report in sorted(reports.items()):
        standings[standing(report)].append(rank)
    lines += [f"    {_ranks(ranks)}: {text}" for text, ranks in list(standings.items())[:_MOST_STANDING]]
    if len(standings) > _MOST_STANDING:
        lines.append(f"    and {len(standings) - _MOST_STANDING} other places")
    accused = dict.fromkeys(rank for finding in diagnosis.findings for rank in finding.ranks)
    for rank in [rank for rank in accused if rank in reports and reports[rank].stack][:_MOST_STACKS]:
        lines.append(f"  Main thread of rank {rank} ({reports[rank].where}):")
        lines += [f"    {frame}" for frame in reports[rank].stack[-_MOST_FRAMES:]]
    return "\n".join(lines)


def spell_ranks(ranks: Sequence[int]) -> str:
    """The first few ranks, and the number of ranks if some are left out."""
    if len(ranks) <= _MOST_RANKS:
        return ", ".join(map(str, ranks))
    return f"{', '.join(map(str, ranks[: _MOST_RANKS - 1]))} ... {ranks[-1]}, {len(ranks)} in all"


def _ranks(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {spell_ranks(ranks)}"
