"""Stragglers: ranks that are slower than their peers for several intervals, so that others wait for them."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from megazero.mpu.context import ParallelContext
from megazero.mpu.waits import Waited

_TIMES = 3  # own, waited, data
_FACTOR = 1.5  # a slow rank's time as a multiple of its peers'
_LEAST = 0.01  # seconds of delay per step; less is noise, or does not matter
_IN_A_ROW = 3  # intervals until a rank is slow, or has recovered


@dataclass(frozen=True, slots=True)
class RankTimes:
    """A rank's means over the steps of an interval, in seconds per step.

    Attributes:
        own: time of a step without waiting.
        waited: time waited in collectives, for other ranks and for transfers.
        data: time to read micro-batches, a part of `own`.
    """

    own: float
    waited: float
    data: float


@dataclass(frozen=True)
class Straggler:
    """A rank that has become slow, or has recovered.

    Attributes:
        rank: the world rank.
        iteration: the iteration after which this was detected.
        times: its times.
        peers: the medians over its peers; `waited` over all other ranks.
        stage: its pipeline stage if it has no peers there, and may have different work; else None.
        recovered: whether it is no longer slow.
    """

    rank: int
    iteration: int
    times: RankTimes
    peers: RankTimes
    stage: int | None
    recovered: bool

    @property
    def ratio(self) -> float:
        """The rank's own time as a multiple of its peers'."""
        return self.times.own / max(self.peers.own, 1e-9)

    @property
    def reads_slowly(self) -> bool:
        """Whether reading data takes at least half of the rank's delay behind its peers."""
        return self.times.data - self.peers.data >= 0.5 * (self.times.own - self.peers.own)

    def __str__(self) -> str:
        times, peers = self.times, self.peers
        both = f"{_ms(times.own)} of its own per step against {_ms(peers.own)}"
        if self.recovered:
            return f"rank {self.rank} is no longer slower than its peers: {both}"
        text = (
            f"rank {self.rank} takes {self.ratio:.1f} times its peers' time: {both}; the others wait for "
            f"{_ms(peers.waited)} of a step's {_ms(peers.own + peers.waited)}"
        )
        if self.reads_slowly:
            text += f"; reading data is what is slow, {_ms(times.data)} against {_ms(peers.data)}"
        if self.stage is not None:
            text += f"; it is alone in stage {self.stage} of the pipeline, whose work may be more"
        return text


@dataclass
class _TimeSums:
    """Sums of times over measured steps, in seconds."""

    steps: int = 0
    whole: float = 0.0
    waited: float = 0.0
    data: float = 0.0

    @property
    def means(self) -> RankTimes:
        steps = max(1, self.steps)
        waited = min(self.waited, self.whole)
        return RankTimes((self.whole - waited) / steps, waited / steps, self.data / steps)


@dataclass(frozen=True)
class SlowRanks:
    """The known slow ranks, and rank -> for how many intervals in a row its times contradicted that."""

    changed: Mapping[int, int] = field(default_factory=dict)
    slow: frozenset[int] = frozenset()

    def after(
        self, iteration: int, times: Sequence[RankTimes], stages: Sequence[int]
    ) -> tuple[SlowRanks, list[Straggler]]:
        """Add the times of an interval; return the new state and the ranks that have changed.

        Args:
            iteration: the last iteration of the interval.
            times: the times of each rank.
            stages: each rank's pipeline stage. A rank is compared with those of its stage, which do the same
                work, or with all ranks if it is alone there.
        """
        changed, slow, stragglers = {}, set(self.slow), []
        by_stage: dict[int, list[float]] = defaultdict(list)
        for stage, rank_times in zip(stages, times, strict=True):
            by_stage[stage].append(rank_times.own)
        everyone = sorted(rank_times.own for rank_times in times)
        compared = {stage: sorted(own) if own[1:] else everyone for stage, own in by_stage.items()}
        for rank, rank_times in enumerate(times):
            usual = _median_without(compared[stages[rank]], rank_times.own)
            is_slow = rank_times.own > _FACTOR * usual and rank_times.own - usual > _LEAST
            if is_slow == (rank in slow):
                continue
            changed[rank] = self.changed.get(rank, 0) + 1
            if changed[rank] < _IN_A_ROW:
                continue
            del changed[rank]
            slow ^= {rank}
            others = [other for other in range(len(times)) if other != rank]
            peers = [other for other in others if stages[other] == stages[rank]]
            stragglers.append(
                Straggler(
                    rank=rank,
                    iteration=iteration,
                    times=rank_times,
                    peers=RankTimes(
                        usual,
                        waited=median(times[other].waited for other in others),
                        data=median(times[other].data for other in peers or others),
                    ),
                    stage=None if peers else stages[rank],
                    recovered=not is_slow,
                )
            )
        return SlowRanks(changed, frozenset(slow)), stragglers


class Stragglers:
    """Adds up this rank's times, and compares them with other ranks' at the end of each interval.

    The times share a reduction (max) with other concerns: each rank sets its own `slots` and leaves those of
    others 0, so that the maximum has the times of all ranks.

    Args:
        interval: iterations; None compares nothing.
    """

    def __init__(self, interval: int | None, context: ParallelContext):
        self.interval = interval if context.world_size > 1 and context.watch is not None else None
        self._context = context
        self._steps: list[tuple[float, float, Waited]] = []
        self._warm = False
        self._known = SlowRanks()
        self.summary: dict[str, list[float]] | None = None

    def add(self, seconds: float, data_seconds: float, waited: Waited | None) -> None:
        """Count a step of this rank, if it was measured."""
        if self.interval is not None and waited is not None:
            self._steps.append((seconds, data_seconds, waited))

    def slots(self, iteration: int) -> list[float]:
        """This rank's values for the reduction after `iteration`; empty unless it ends an interval."""
        if self.interval is None or iteration % self.interval:
            return []
        means, size = self._take().means, self._context.world_size
        values = [0.0] * (_TIMES * size)
        at = _TIMES * self._context.rank
        values[at : at + _TIMES] = means.own, means.waited, means.data
        return values

    def after(self, iteration: int, slots: Sequence[float]) -> list[Straggler]:
        """Return the ranks that have become slow or have recovered; the same on all ranks.

        Also set `summary` to minimum, median and maximum over ranks. The first interval, in which memory is
        allocated and kernels are compiled, is not judged.

        Args:
            iteration: as for `slots`.
            slots: the maximum over all ranks' slots; empty except after an interval.
        """
        if not slots:
            return []
        times = [RankTimes(*slots[at : at + _TIMES]) for at in range(0, len(slots), _TIMES)]
        self.summary = {
            "own": _summary([rank_times.own for rank_times in times]),
            "waited": _summary([rank_times.waited for rank_times in times]),
        }
        if not self._warm or not all(rank_times.own for rank_times in times):  # or a rank has no times
            self._warm = True
            return []
        per_stage = len(times) // self._context.grid.pp
        stages = [rank // per_stage for rank in range(len(times))]  # pp is the outermost axis
        self._known, stragglers = self._known.after(iteration, times, stages)
        return stragglers

    def take_summary(self) -> dict[str, list[float]] | None:
        """Return `summary` if there is a new one, and reset it to None."""
        summary, self.summary = self.summary, None
        return summary

    def _take(self) -> _TimeSums:
        """Sum and remove the steps whose waiting times are known by now."""
        sums, pending = _TimeSums(), []
        for step in self._steps:
            whole, data, waited = step
            seconds = waited.seconds
            if seconds is None:
                pending.append(step)
                continue
            sums = _TimeSums(sums.steps + 1, sums.whole + whole, sums.waited + seconds, sums.data + data)
        self._steps = pending
        return sums


def _median_without(ascending: Sequence[float], one: float) -> float:
    """The median of sorted numbers without one of them."""
    left, count = bisect_left(ascending, one), len(ascending) - 1
    low, high = ((count - 1) // 2, count // 2)
    return (ascending[low + (low >= left)] + ascending[high + (high >= left)]) / 2


def _summary(values: Sequence[float]) -> list[float]:
    return [min(values), median(values), max(values)]


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.0f} ms"
