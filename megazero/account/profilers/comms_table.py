"""The comms logger's table: a row for the calls of one group, operation and size."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import fmean
from typing import NamedTuple

from megazero.account.profilers.calls import rates

_SAMPLES = 4096  # the most samples of a row
_UNEVEN = 0.25  # if the shortest wait is shorter than the longest by this share, a rank is reported as late
_TRIMMED = 0.1  # the share of samples left out at either end of a mean, because first calls connect


class CallKind(NamedTuple):
    """The operation and size of calls; a rounded size 2^k stands for sizes above 2^(k-1), up to 2^k."""

    operation: str
    nbytes: int


@dataclass
class CallTotals:
    """The calls of one operation and size.

    Attributes:
        calls: the number of calls.
        hidden: the number of calls that were complete when the run waited for them.
        exposed: seconds that the host or the device waited in all calls.
        samples: (seconds waited, seconds taken) of evenly spaced calls; the second is None for messages and
            hidden calls.
    """

    calls: int = 0
    hidden: int = 0
    exposed: float = 0.0
    samples: list[tuple[float, float | None]] = field(default_factory=list)
    _stride: int = 1

    def add(self, waited: float, took: float | None, *, hidden: bool = False) -> None:
        """Count a call. Samples depend only on the number of calls, so all members sample the same calls."""
        if self.calls % self._stride == 0:
            self.samples.append((waited, took))
            if len(self.samples) == _SAMPLES:
                self.samples, self._stride = self.samples[::2], 2 * self._stride
        self.calls += 1
        self.exposed += waited
        self.hidden += hidden


@dataclass(frozen=True)
class CommsLine:
    """A row of the table.

    Attributes:
        group, members: the group's name and size.
        key, row: the calls.
        waited: mean seconds of a call for which this rank waited for the last member; None if unknown.
    """

    group: str
    members: int
    key: CallKind
    row: CallTotals
    waited: float | None = None

    @property
    def seconds(self) -> float | None:
        """The mean time of the calls that were not hidden; None without any, and for messages."""
        took = [took for _, took in self.row.samples if took is not None]
        return trimmed_mean(took) if took else None

    @property
    def rates(self) -> tuple[float, float] | None:
        """(algorithm, bus) bandwidth in bytes per second, counted from the arrival of the last member."""
        seconds = self.seconds
        if seconds is None or self.key.operation == "barrier":
            return None
        return rates(*self.key, seconds - (self.waited or 0.0), self.members)

    def as_json(self) -> dict[str, object]:
        """The line as JSON; rates are in GB/s."""
        pair, row = self.rates, self.row
        algorithm, bus = (None, None) if pair is None else (rate / 1e9 for rate in pair)
        counted = {"calls": row.calls, "hidden": row.hidden, "exposed": row.exposed}
        times = {"seconds": self.seconds, "waited": self.waited}
        speeds = {"algorithm_gb_per_s": algorithm, "bus_gb_per_s": bus}
        place = {"group": self.group, "members": self.members}
        return {**place, **self.key._asdict(), **counted, **times, **speeds}


@dataclass(frozen=True)
class Waiting:
    """The waits of a group's members for each other, per call.

    Attributes:
        group: the group's name.
        last: the world rank that waited least, so that the others wait for it.
        least, most: the mean seconds that rank `last` waited, and that the longest-waiting rank did.
    """

    group: str
    last: int
    least: float
    most: float


def comms_table(lines: Iterable[CommsLine], waiting: Iterable[Waiting]) -> list[str]:
    """Format the report as lines of text."""
    heads = ("group", "operation", "size", "calls", "hidden", "exposed ms", "mean ms", "waited ms")
    widths = (16, 15, 11, 8, 8, 12, 10, 10)
    text = [_joined((*heads, "alg GB/s", "bus GB/s"), (*widths, 10, 10))]
    for line in lines:
        pair = line.rates
        cells = (
            f"{line.group} ({line.members})",
            line.key.operation,
            size_text(line.key.nbytes),
            str(line.row.calls),
            str(line.row.hidden),
            f"{1e3 * line.row.exposed:.1f}",
            *(("-" if x is None else f"{1e3 * x:.3f}") for x in (line.seconds, line.waited)),
            *(("-", "-") if pair is None else (f"{x / 1e9:.3g}" for x in pair)),
        )
        text.append(_joined(cells, (*widths, 10, 10)))
    for one in waiting:
        if one.most - one.least > _UNEVEN * one.most:
            text.append(
                f"{one.group}: rank {one.last} comes last: others wait up to {1e3 * one.most:.3f} ms in a "
                f"call, and it waits for {1e3 * one.least:.3f} ms"
            )
    return text


def size_text(nbytes: int) -> str:
    """Bytes with a unit: ``1.5 MiB``."""
    power = max(0, min((nbytes.bit_length() - 1) // 10, 4))
    return f"{nbytes / 1024**power:.4g} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def trimmed_mean(values: list[float]) -> float:
    """Return the mean without the lowest and the highest tenth."""
    cut = int(len(values) * _TRIMMED)
    return fmean(sorted(values)[cut : len(values) - cut])


def _joined(cells: Iterable[str], widths: Iterable[int]) -> str:
    padded = [
        cell.ljust(width) if at < 2 else cell.rjust(width)
        for at, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return "".join(padded).rstrip()
