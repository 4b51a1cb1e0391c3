"""The consumption of each step of a training: a pure function of what was consumed before it.

The batch size follows from the samples consumed so far (a ramp), the sequence length from the steps or tokens
(a curriculum), and the tokens that layers see from the steps (random-LTD). Counts over a whole training are
sums over segments of equal steps, found by bisection, in integers.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from megazero.config.pacing import pieces
from megazero.config.stairs import BatchStairs
from megazero.config.tree.config import Config
from megazero.config.tree.curriculum import CurriculumConfig
from megazero.config.tree.model import ModelConfig
from megazero.config.tree.skipping import SkippingConfig
from megazero.config.tree.training import BatchConfig

Unit = Literal["iters", "samples", "tokens"]

UNITS: tuple[Unit, ...] = ("iters", "samples", "tokens")


@dataclass(frozen=True)
class Progress:
    """The amount of training that has been consumed, counted in all three units at once.

    A step that made no update consumed its data, so it counts as well.

    Attributes:
        iteration: steps done.
        samples: sequences trained on, over all replicas.
        tokens: positions in these sequences, at the sequence length of their step, before any mask. Where
            some layers see only a part of them, it is the mean over the layers.
    """

    iteration: int = 0
    samples: int = 0
    tokens: int = 0

    def count(self, unit: Unit) -> int:
        """The progress in one unit."""
        return self.iteration if unit == "iters" else getattr(self, unit)

    def __sub__(self, earlier: Progress) -> Progress:
        return Progress(
            self.iteration - earlier.iteration, self.samples - earlier.samples, self.tokens - earlier.tokens
        )


BEGINNING = Progress()


@dataclass(frozen=True)
class Step:
    """One optimizer step.

    Attributes:
        before: the progress before it.
        batch_size: samples in the global batch.
        micro_batches: micro-batches that each replica accumulates.
        sequence_length: tokens per row.
        rows: rows that each sample is cut into; a rest that does not fill one is dropped.
        kept_tokens: tokens of a row that layers with random-LTD see; None if they see all.
        layer_tokens: tokens of a row that a layer sees, as the mean over the layers, rounded down; None for
            all.
    """

    before: Progress
    batch_size: int
    micro_batches: int
    sequence_length: int
    rows: int = 1
    kept_tokens: int | None = None
    layer_tokens: int | None = None

    @property
    def tokens(self) -> int:
        """The tokens of the step: positions of the batch, before any mask, that a layer sees on average.

        Layers with random-LTD see fewer. Megatron-DeepSpeed counts tokens so.
        """
        seen = self.sequence_length if self.layer_tokens is None else self.layer_tokens
        return self.batch_size * self.rows * seen

    @property
    def positions(self) -> int:
        """Positions in the global batch, before any mask."""
        return self.batch_size * self.rows * self.sequence_length

    @property
    def after(self) -> Progress:
        """The progress when this step is done."""
        return self.repeated(1)

    def repeated(self, times: int) -> Progress:
        """The progress after `times` steps like this one, of which it is the first."""
        return Progress(
            self.before.iteration + times,
            self.before.samples + times * self.batch_size,
            self.before.tokens + times * self.tokens,
        )


@dataclass(frozen=True)
class BatchRamp:
    """The global batch size as a function of the samples consumed (Megatron-LM's linear ramp-up).

    The batch grows from `start` to `final` in equal `increment`s, each held for an equal share of
    `ramp_samples`. Integers throughout, so the step at which it grows does not depend on rounding.
    """

    start: int
    increment: int
    ramp_samples: int
    final: int

    @classmethod
    def constant(cls, size: int) -> BatchRamp:
        """A batch of the same size at every step."""
        return cls(start=size, increment=1, ramp_samples=1, final=size)

    @classmethod
    def of(cls, batch: BatchConfig, model: ModelConfig, data_parallel_size: int) -> BatchSizes:
        """The batch sizes by the flags: a ramp, a schedule in steps, or a constant size.

        If no flag gives the batch size, it is one micro-batch on each replica.
        """
        if batch.step_batch_size_schedule:
            return BatchStairs.of(batch.step_batch_size_schedule, model.seq_length)
        final = batch.final_batch_size or batch.micro_batch_size * data_parallel_size
        if batch.rampup_batch_size is None:
            return cls.constant(final)
        return cls(*batch.rampup_batch_size, final)

    @property
    def increments(self) -> int:
        """The number of times that the batch grows."""
        return max(0, (self.final - self.start) // self.increment)

    @property
    def sizes(self) -> Sequence[int]:
        """All sizes, in order."""
        return range(self.start, self.final + 1, self.increment)

    def at(self, consumed_samples: int) -> int:
        """The global batch size of the step that starts after `consumed_samples`."""
        done = self._increments_done(consumed_samples)
        return self.final if done == self.increments else self.start + done * self.increment

    def steps_held(self, consumed_samples: int) -> int | None:
        """The number of steps after `consumed_samples` with this size; None if it never changes again."""
        done = self._increments_done(consumed_samples)
        if done == self.increments:
            return None
        grows_at = -(-(done + 1) * self.ramp_samples // self.increments)
        return -(-(grows_at - consumed_samples) // self.at(consumed_samples))

    def _increments_done(self, consumed_samples: int) -> int:
        return min(self.increments, consumed_samples * self.increments // self.ramp_samples)


BatchSizes = BatchRamp | BatchStairs
"""The global batch size as a function of the samples consumed."""


@dataclass(frozen=True)
class SequenceLengths:
    """The sequence length as a function of the steps done, or of the tokens.

    Attributes:
        pieces: (count at which a piece begins, tokens per sample in it), in ascending order from 0. Without a
            curriculum there is a single piece.
        unit: the unit of the counts.
        reshaped: tokens of a whole sample, if it is cut into as many rows as it fills; None if a sample is
            one row.
    """

    pieces: tuple[tuple[int, int], ...]
    unit: Unit = "iters"
    reshaped: int | None = None

    @classmethod
    def constant(cls, length: int) -> SequenceLengths:
        """The same length at every step."""
        return cls(((0, length),))

    @classmethod
    def of(cls, settings: CurriculumConfig, length: int) -> SequenceLengths:
        """The lengths of a curriculum up to `length`; without one, a constant length."""
        pacing = settings.seqlen(length)
        if pacing is None:
            return cls.constant(length)
        return cls(
            pieces(pacing), settings.seqlen_unit, length if settings.seqlen_kind == "reshape" else None
        )

    @property
    def grow(self) -> bool:
        """Whether there is more than one length."""
        return len(self.pieces) > 1

    def at(self, progress: Progress) -> int:
        """Tokens per sample of the step that follows `progress`."""
        return self.pieces[self._following(progress) - 1][1]

    def rows(self, length: int) -> int:
        """Rows of this length that a sample gives."""
        return 1 if self.reshaped is None else self.reshaped // length

    def steps_held(self, progress: Progress, tokens: int) -> int | None:
        """The number of steps after `progress` with the same length; None if it never changes again.

        `tokens` is the number in each of these steps.
        """
        following = self._following(progress)
        if following == len(self.pieces):
            return None
        missing = self.pieces[following][0] - progress.count(self.unit)
        return missing if self.unit == "iters" else -(-missing // tokens)

    def _following(self, progress: Progress) -> int:
        return bisect_right(self.pieces, progress.count(self.unit), key=lambda piece: piece[0])


@dataclass(frozen=True)
class KeptTokens:
    """The number of tokens of each row that layers with random-LTD see, as a function of the steps done.

    Attributes:
        lengths: the number of tokens.
        dropping: the number of layers with random-LTD.
        layers: the number of all layers of the model.
    """

    lengths: SequenceLengths
    dropping: int
    layers: int

    @classmethod
    def of(cls, settings: SkippingConfig, model: ModelConfig) -> KeptTokens | None:
        """The kept tokens of a model's layers; None without random-LTD."""
        pacing = settings.kept_tokens(model.seq_length)
        if pacing is None:
            return None
        dropping = len(settings.dropping_layers(model.num_layers))
        return cls(SequenceLengths(pieces(pacing)), dropping, model.num_layers)

    def at(self, progress: Progress, length: int) -> tuple[int, int] | tuple[None, None]:
        """Tokens of a row of `length` that these layers see, and the mean over all layers, rounded down.

        Both are None where no layer drops tokens.
        """
        kept = self.lengths.at(progress)
        if kept >= length:
            return None, None
        seen = length * (self.layers - self.dropping) + kept * self.dropping
        return kept, seen // self.layers


@dataclass(frozen=True)
class Steps:
    """The endless sequence of a training's steps, from `start` on.

    Attributes:
        ramp: batch sizes of the steps.
        unit: samples in one micro-batch on every replica.
        lengths: sequence lengths of the steps.
        start: the progress before the first of them. A run resumed with other batch sizes may
            start between two of the steps that it would have taken with them from the beginning.
        kept: the number of tokens that layers with random-LTD see; None without random-LTD.
        origin: the progress at which the settings of the run before `start` began; they may be the same.
    """

    ramp: BatchSizes
    unit: int
    lengths: SequenceLengths
    start: Progress = BEGINNING
    kept: KeptTokens | None = None
    origin: Progress = BEGINNING

    @classmethod
    def of(
        cls,
        config: Config,
        data_parallel_size: int,
        start: Progress = BEGINNING,
        origin: Progress = BEGINNING,
    ) -> Steps:
        """The steps of a run from `start` on, on `data_parallel_size` replicas of the model."""
        model, batch = config.model, config.batch
        return cls(
            BatchRamp.of(batch, model, data_parallel_size),
            batch.micro_batch_size * data_parallel_size,
            SequenceLengths.of(config.curriculum, model.seq_length),
            start,
            KeptTokens.of(config.skipping, model),
            origin,
        )

    @property
    def began(self) -> Progress:
        """The progress at which these settings began: `origin` if it leads to `start`, else `start`."""
        origin, start = self.origin, self.start
        led = origin.iteration <= start.iteration
        return origin if led and replace(self, start=origin).before(start.iteration) == start else start

    @property
    def from_beginning(self) -> Steps:
        """The steps of a training with these settings from its beginning."""
        return self if self.start == BEGINNING else replace(self, start=BEGINNING)

    def at(self, progress: Progress) -> Step:
        """The step that follows `progress`."""
        size, length = self.ramp.at(progress.samples), self.lengths.at(progress)
        seen = (None, None) if self.kept is None else self.kept.at(progress, length)
        return Step(progress, size, size // self.unit, length, self.lengths.rows(length), *seen)

    def before(self, iteration: int) -> Progress:
        """The progress when `iteration` steps are done, counted from the beginning of the training.

        Raises:
            ValueError: `start` is later than `iteration`.
        """
        if iteration < self.start.iteration:
            raise ValueError(f"`iteration` must be at least {self.start.iteration}, but is {iteration}")
        index = bisect_right(self.segments, iteration, key=lambda first: first.before.iteration)
        first = self.segments[index - 1]
        return first.repeated(iteration - first.before.iteration)

    def within(self, samples: int) -> int:
        """The most steps that consume no more than `samples`; at least those before `start`."""
        index = bisect_right(self.segments, samples, key=lambda first: first.before.samples)
        if index == 0:
            return self.start.iteration
        first = self.segments[index - 1]
        return first.before.iteration + (samples - first.before.samples) // first.batch_size

    def convert(self, length: float, unit: Unit, into: Unit) -> float:
        """Convert a length from one unit to another, as if a step could be divided.

        The steps before `began` count as equal.
        """
        if self.start != self.began:
            return replace(self, start=self.began).convert(length, unit, into)
        if length <= self.start.count(unit):
            return self.start.count(into) * (length / self.start.count(unit)) if length else 0.0
        index = bisect_right(self.segments, length, key=lambda first: first.before.count(unit))
        first = self.segments[max(index, 1) - 1]
        times = (length - first.before.count(unit)) / (first.after.count(unit) - first.before.count(unit))
        return first.before.count(into) + times * (first.after.count(into) - first.before.count(into))

    def reaching(self, tokens: int) -> int:
        """The fewest steps that consume at least `tokens`, and at least those before `start`."""
        index = bisect_left(self.segments, tokens, key=lambda first: first.before.tokens)
        if index == 0:
            return self.start.iteration
        first = self.segments[index - 1]
        return first.before.iteration - (-(tokens - first.before.tokens) // first.tokens)

    @cached_property
    def segments(self) -> tuple[Step, ...]:
        """The first step of each segment of equal steps."""
        return tuple(self._walk())

    def _walk(self) -> Iterator[Step]:
        progress = self.start
        while True:
            first = self.at(progress)
            yield first
            spans = [self.ramp.steps_held(progress.samples), self.lengths.steps_held(progress, first.tokens)]
            if self.kept is not None:
                spans.append(self.kept.lengths.steps_held(progress, first.tokens))
            # All steps are equal until the first of these spans ends.
            finite = [span for span in spans if span is not None]
            if not finite:
                return
            progress = first.repeated(min(finite))
