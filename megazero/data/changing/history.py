"""The history of a run's blend: which shares acted from which sample on, as checkpoints keep it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator


class _Facts(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="ignore", allow_inf_nan=False)


class Share(_Facts):
    """A source in a blend: `source` is a hash of its content, with the part that is read of it."""

    source: str
    path: str
    weight: PositiveFloat


class Origin(_Facts):
    """The origin of a blend: the file, a hash of its text, its owner, and when the run noticed it."""

    file: str
    digest: str
    owner: str
    time: str


class Segment(_Facts):
    """A blend from sample `start` on; `taken` counts the samples that each source had given before."""

    start: NonNegativeInt
    shares: tuple[Share, ...] = Field(min_length=1)
    taken: dict[str, NonNegativeInt] = Field(default_factory=dict)
    origin: Origin | None = None

    @property
    def percent(self) -> dict[str, float]:
        """Source -> its share of the samples, in percent."""
        total = sum(share.weight for share in self.shares)
        return {share.source: 100 * share.weight / total for share in self.shares}

    def mixes(self, shares: tuple[Share, ...]) -> bool:
        """Whether these are the sources and weights of this segment."""
        own, other = self.percent, Segment(start=0, shares=shares).percent
        return own.keys() == other.keys() and all(math.isclose(own[name], other[name]) for name in own)

    def moved(self, paths: Mapping[str, str]) -> Segment:
        """The segment with sources under these paths, where their files are now."""
        shares = (s.model_copy(update={"path": paths.get(s.source, s.path)}) for s in self.shares)
        return self.model_copy(update={"shares": tuple(shares)})


class History(_Facts):
    """The segments of a training's blend.

    samples: the number of samples that the first blend was planned for. planned: the number of samples for
    which the order of each of its sources was planned; further samples follow in epochs of their own.
    """

    samples: PositiveInt
    planned: dict[str, PositiveInt]
    segments: tuple[Segment, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _in_order(self) -> History:
        starts = [segment.start for segment in self.segments]
        if starts[0] or any(before >= after for before, after in pairwise(starts)):
            raise ValueError("`segments` must begin at sample 0 and go on in ascending order")
        if self.planned.keys() != self.segments[0].percent.keys():
            raise ValueError("`planned` must be of the sources of the first segment")
        return self

    @property
    def sources(self) -> tuple[str, ...]:
        """All sources that the blend has had, in the order of their first mention."""
        return tuple(dict.fromkeys(share.source for segment in self.segments for share in segment.shares))

    @property
    def rows(self) -> list[tuple[str, str, str, str, str]]:
        """A row of text for each share: path, origin, first sample, share, samples given before."""
        rows = []
        for segment in self.segments:
            origin = f"{segment.origin.owner}, {segment.origin.time}" if segment.origin else "-"
            for name, path in ((share.source, share.path) for share in segment.shares):
                given = f"{segment.percent[name]:.4g}%", f"{segment.taken.get(name, 0):,}"
                rows.append((path, origin, f"{segment.start:,}", *given))
        return rows

    def until(self, sample: int) -> tuple[Segment, ...]:
        """The segments that begin at a sample or before."""
        return tuple(segment for segment in self.segments if segment.start <= sample)

    def changed(self, segment: Segment) -> History:
        """The history with a new segment, in place of all that would begin there or later."""
        return self.model_copy(update={"segments": (*self.until(segment.start - 1), segment)})

    @property
    def change(self) -> str:
        """The changes of the last segment, for a person; empty if there is only one."""
        if len(self.segments) == 1:
            return ""
        before, last = self.segments[-2:]
        paths = {share.source: share.path for share in (*last.shares, *before.shares)}
        changes = (
            f"{path} {before.percent.get(name, 0):.4g}% -> {last.percent.get(name, 0):.4g}% "
            f"({last.taken.get(name, 0):,} samples so far)"
            for name, path in paths.items()
        )
        origin = last.origin
        where = f" in {origin.file} of {origin.owner}, seen {origin.time}," if origin else ""
        return f"the blend{where} acts from sample {last.start:,} on: {', '.join(changes)}"
