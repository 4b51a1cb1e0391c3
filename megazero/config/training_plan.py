"""The steps and the end of a training, computed once for whatever needs a length."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from megazero.config.fields import names_with
from megazero.config.numbers import LARGEST
from megazero.config.steps import BEGINNING, UNITS, Progress, Step, Steps, Unit
from megazero.config.tree.config import Config
from megazero.config.tree.roles import Role
from megazero.config.tree.schedule import ScheduleConfig
from megazero.config.tree.training import TrainingConfig
from megazero.errors import ConfigError

LR_LENGTHS = tuple(name for name in names_with(Role.LENGTH, "optimizer") if name.startswith("lr_"))
"""The settings that are lengths of the learning rate's schedule, each in iterations, samples or tokens."""


@dataclass(frozen=True)
class Limits:
    """The limits of a training, which stops at the first that is reached; None sets no limit.

    Attributes:
        iterations: the number of steps.
        samples: the most samples consumed, in whole steps; a rest that does not fill a step stays unused.
        tokens: the number of tokens that the last step reaches or passes, as in Megatron-DeepSpeed.
    """

    iterations: int | None = None
    samples: int | None = None
    tokens: int | None = None

    @classmethod
    def of(cls, training: TrainingConfig) -> Limits:
        """The limits of a run."""
        return cls(training.train_iters, training.train_samples, training.train_tokens)

    def end(self, steps: Steps) -> Progress:
        """The progress when these steps stop; their start, if a limit lies before it.

        They stop before their tokens exceed 64 bits, which no run reaches.

        Raises:
            ConfigError: there is no limit.
        """
        ends = []
        if self.iterations is not None:
            ends.append(max(self.iterations, steps.start.iteration))
        if self.samples is not None:
            ends.append(steps.within(self.samples))
        if self.tokens is not None:
            ends.append(steps.reaching(self.tokens))
        if not ends:
            raise ConfigError(
                "`train_iters`, `train_samples` or `train_tokens` must be set, but none is; "
                "say how long to train."
            )
        ends.append(max(steps.reaching(LARGEST + 1) - 1, steps.start.iteration))
        return steps.before(min(ends))


@dataclass(frozen=True)
class WarmupLength:
    """A warmup that is counted in another unit than the decay after it."""

    length: float
    unit: Unit


@dataclass(frozen=True)
class LrLengths:
    """Lengths of the schedules of learning rate and weight decay, those of the rate all counted in `unit`.

    Attributes:
        unit: the unit that the schedule counts in.
        warmup: the count at which the warmup ends; not a whole number if it is set as a fraction.
        decay: the count at which the decay ends.
        wsd_decay: the length of the final decay of WSD; None without it.
        warmup_as_given: the warmup in its own unit, if that is another. Megatron-DeepSpeed warms up over
            iterations or samples, and then decays over tokens, from those consumed by then.
        weight_decay: the samples over which the weight decay changes; 0 if it is constant.
    """

    unit: Unit
    warmup: float
    decay: int
    wsd_decay: int | None
    warmup_as_given: WarmupLength | None = None
    weight_decay: int = 0

    @classmethod
    def of(
        cls, optimizer: ScheduleConfig, training: TrainingConfig, steps: Steps, end: Progress
    ) -> LrLengths:
        """The lengths for a training of these steps until `end`.

        A decay without a given length is as long as the training's limit in its unit, reached or not, as in
        Megatron; without one in its unit it runs to the end of the training.
        """
        unit = _lr_unit(optimizer, training)
        decay = getattr(optimizer, f"lr_decay_{unit}")
        if decay is None:
            decay = getattr(training, f"train_{unit}") or end.count(unit)
        given = _warmup_length(optimizer, training, unit, decay)
        wsd_decay = getattr(optimizer, f"lr_wsd_decay_{unit}") if optimizer.lr_decay_style == "WSD" else None
        moves = optimizer.weight_decay_incr_style != "constant"
        samples = end.samples if moves else 0
        if given.unit == unit:
            return cls(unit, given.length, decay, wsd_decay, None, samples)
        length = steps.convert(given.length, given.unit, unit)
        return cls(unit, length, decay, wsd_decay, given, samples)


def _warmup_length(
    optimizer: ScheduleConfig, training: TrainingConfig, unit: Unit, decay: int
) -> WarmupLength:
    """Return the warmup in the unit in which it is given.

    A fraction is a fraction of the decay. Beside a decay in tokens it is a fraction of the training's
    iterations or samples, as in Megatron-DeepSpeed.
    """
    fraction = optimizer.lr_warmup_fraction
    if fraction is None:
        given: Unit = next((u for u in UNITS if getattr(optimizer, f"lr_warmup_{u}")), unit)
        return WarmupLength(getattr(optimizer, f"lr_warmup_{given}"), given)
    if unit == "tokens" and training.train_iters is not None:
        return WarmupLength(fraction * training.train_iters, "iters")
    if unit == "tokens" and training.train_samples is not None:
        return WarmupLength(fraction * training.train_samples, "samples")
    return WarmupLength(fraction * decay, unit)


@dataclass(frozen=True)
class Evaluations:
    """The data that evaluations read; each uses the batch size at the end of a ramp.

    Attributes:
        interval: training steps from one to the next; None if there is only one, at the end.
        batches: global batches per evaluation.
        batch_size: samples per global batch.
        micro_batches: micro-batches per global batch, on each replica.
        same: whether all of them read the same samples.
        sequence_length: tokens of each sample.
    """

    interval: int | None
    batches: int
    batch_size: int
    micro_batches: int
    same: bool
    sequence_length: int = 1

    @classmethod
    def of(cls, training: TrainingConfig, sequence_length: int, steps: Steps) -> Evaluations:
        """The evaluations between these steps."""
        size = steps.ramp.final
        return cls(
            training.eval_interval,
            training.eval_iters,
            size,
            size // steps.unit,
            training.eval_from_start,
            sequence_length,
        )

    @property
    def samples(self) -> int:
        """Samples per evaluation."""
        return self.batches * self.batch_size

    def first_sample(self, iteration: int) -> int:
        """The position in the validation data where the evaluation after `iteration` steps begins.

        Each evaluation reads the next part of the data, as Megatron-LM's do, unless all are to read the same.
        """
        if self.same or self.interval is None:
            return 0
        past = iteration // self.interval
        if past and iteration % self.interval == 0:
            past -= 1
        return past * self.samples

    def samples_until(self, iteration: int) -> int:
        """Validation samples read by a training of `iteration` steps, including the evaluation at its end.

        The count is limited to what 64 bits can number, which no run reaches.
        """
        if self.same or self.interval is None:
            return self.samples
        return min((iteration // self.interval + 1) * self.samples, LARGEST // self.sequence_length)


@dataclass(frozen=True)
class TrainingPlan:
    """A training's steps, its end, and the lengths that follow from both.

    Attributes:
        steps: the steps and the consumption of each.
        limits: the limits at which they stop.
        lr: lengths of the schedules of the whole training.
        evaluations: the data that evaluations read between the steps.
    """

    steps: Steps
    limits: Limits
    lr: LrLengths
    evaluations: Evaluations

    @cached_property
    def end(self) -> Progress:
        """The progress when training stops, in whole steps: the length of the training in every unit."""
        return self.limits.end(self.steps)

    def at(self, progress: Progress) -> Step:
        """The step that follows `progress`."""
        return self.steps.at(progress)

    def before(self, iteration: int) -> Progress:
        """The progress when `iteration` steps are done."""
        return self.steps.before(iteration)


def training_plan_of(
    config: Config, data_parallel_size: int, start: Progress = BEGINNING, origin: Progress = BEGINNING
) -> TrainingPlan:
    """Make the training plan of a run on `data_parallel_size` replicas of the model.

    Args:
        config: the run's configuration.
        data_parallel_size: replicas of the model.
        start: the progress that a checkpoint records. If these same steps led there, the plan is the one from
            the beginning; if the batch size has changed since, limits and schedule span both parts.
        origin: where the settings of the run that saved the checkpoint began.

    Raises:
        ConfigError: no limit is set.
    """
    training = config.training
    steps, limits = Steps.of(config, data_parallel_size, start, origin), Limits.of(training)
    lengths = LrLengths.of(config.optimizer, training, steps, limits.end(steps))
    return TrainingPlan(steps, limits, lengths, Evaluations.of(training, config.model.seq_length, steps))


def _lr_unit(optimizer: ScheduleConfig, training: TrainingConfig) -> Unit:
    """The unit of the learning rate schedule: that of its own lengths, or else of the training's length."""
    warmups_last = sorted(LR_LENGTHS, key=lambda name: name.startswith("lr_warmup_"))
    for name in warmups_last:
        for unit in UNITS:
            if name.endswith(unit) and getattr(optimizer, name):
                return unit
    if training.train_iters is not None:
        return "iters"
    return "samples" if training.train_samples is not None else "tokens"
