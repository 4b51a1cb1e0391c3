"""Learning rate and weight decay as pure functions of the progress of the training.

The formulas and their edge cases are those of Megatron-Core's `OptimizerParamScheduler`, so a schedule gives
the same values in both. It matters when a step reads its value: Megatron advances its scheduler *after*
each update, so the first update of a training uses progress 0 (with warmup from zero, a learning rate of
zero), and update k uses the progress of the k - 1 updates before it. A step without an update does not move
it on. Call `LearningRate.at(progress)` with the progress of the updates before the step.

Megatron's iteration-based training counts samples (iterations x global batch) internally; for a constant
batch the ratios, and so the values, are the same (`LearningRate` names the exception). With a batch-size
ramp, a length given in iterations is counted in iterations here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from megazero.config.derive import decoupled
from megazero.config.steps import Progress, Unit
from megazero.config.training_plan import TrainingPlan, WarmupLength
from megazero.config.tree.optimizer import OptimizerConfig
from megazero.config.tree.schedule import DecayStyle, FinalDecayStyle, WeightDecayStyle
from megazero.errors import ConfigError


@dataclass(frozen=True)
class Warmup:
    """Linear rise from the rate `start` over `length` units, which need not be a whole number.

    `as_given` is the same length in its own unit, if that differs from the decay's.
    """

    length: float = 0
    start: float = 0.0
    as_given: WarmupLength | None = None


@dataclass(frozen=True)
class Cycles:
    """The cycles of cosine-restarts (SGDR; Loshchilov & Hutter 2017, arXiv:1608.03983).

    The first takes `first` units, each further one `growth` times as many as the one before: `T_0` and
    `T_mult` of torch's `CosineAnnealingWarmRestarts`.
    """

    first: float
    growth: float = 1.0

    def share(self, count: float) -> float:
        """The share of its cycle that is over `count` units after the first began: 0 at each restart."""
        number = count / self.first
        if self.growth != 1:
            number = math.log1p(number * (self.growth - 1)) / math.log(self.growth)
        number = int(number)
        # The logarithm may be rounded to the other side of a restart.
        number += (self._start(number + 1) <= count) - (self._start(number) > count)
        return (count - self._start(number)) / (self.first * self.growth**number)

    def _start(self, number: int) -> float:
        """The units before cycle `number`, from 0."""
        if self.growth == 1:
            return self.first * number
        return self.first * (self.growth**number - 1) / (self.growth - 1)


@dataclass(frozen=True)
class Decay:
    """The decline to the floor, finished after `length` units (counted from the start of the training).

    `final_style` and `final_length` shape the last part of WSD (warmup, stable, decay; Hu et al. 2024,
    arXiv:2404.06395), which keeps the peak until `length - final_length`. `cycles` are those of
    cosine-restarts, of which the last ends with the decay, whether it is over or not.
    """

    style: DecayStyle
    length: float
    final_style: FinalDecayStyle = "exponential"
    final_length: float | None = None
    cycles: Cycles | None = None


@dataclass(frozen=True)
class LearningRate:
    """A learning rate schedule; its lengths are counted in `unit`.

    Megatron's scheduler counts an iteration as a global batch of samples. That matters for an inverse square
    root without a warmup alone, whose rate is a function of the count itself; `samples_per_unit` is how many
    samples a unit stands for there.

    Raises:
        ConfigError: the values do not make a schedule; the message gives every reason.
    """

    peak: float
    floor: float
    warmup: Warmup
    decay: Decay
    unit: Unit = "iters"
    samples_per_unit: int = 1

    def __post_init__(self) -> None:
        violations = list(self._violations())
        if violations:
            raise ConfigError(violations)

    def _violations(self) -> Iterator[str]:
        if self.floor > self.peak:
            yield f"`min_lr` must be at most `lr` ({self.peak}), but is {self.floor}; lower it."
        if self.warmup.start > self.peak:
            yield (
                f"`lr_warmup_init` must be at most `lr` ({self.peak}), but is {self.warmup.start}; lower it."
            )
        if not self.warmup.length < self.decay.length:
            yield (
                f"The warmup must be shorter than the decay of {self.decay.length} {self.unit}, but is "
                f"{self.warmup.length} {self.unit} long; shorten `lr_warmup_{self.unit}` or lengthen "
                f"`lr_decay_{self.unit}`."
            )
        if self.decay.style == "WSD" and self.decay.final_length is None:
            yield (
                f"`lr_wsd_decay_{self.unit}` must be set when `lr_decay_style` is WSD, but is not; "
                f"set it to the length of the final decay."
            )
        if self.decay.style == "cosine-restarts" and self.decay.cycles is None:
            yield (
                f"`lr_cycle_{self.unit}` must be set when `lr_decay_style` is cosine-restarts, but is not; "
                f"set it to the length of the first cycle."
            )
        if self.decay.style == "WSD" and (self.decay.final_length or 0) > self.decay.length:
            yield (
                f"`lr_wsd_decay_{self.unit}` must be at most the decay length ({self.decay.length}), "
                f"but is {self.decay.final_length}; shorten it."
            )

    def at(self, progress: Progress) -> float:
        """The learning rate of the update that follows `progress`."""
        count = progress.count(self.unit)
        warmup, decay = self.warmup, self.decay
        given = warmup.as_given or WarmupLength(warmup.length, self.unit)
        risen = progress.count(given.unit)
        if given.length > 0 and risen <= given.length:
            return warmup.start + (self.peak - warmup.start) * float(risen) / float(given.length)
        if decay.style == "constant":
            return self.peak
        if count > decay.length or (decay.cycles and count == decay.length):  # no restart at the end
            return self.floor
        if decay.style == "inverse-square-root":
            samples = self.samples_per_unit
            rate: float = self.peak * max(warmup.length * samples, 1) ** 0.5 / max(count * samples, 1) ** 0.5
            return max(self.floor, rate)
        return self.floor + self._height(count) * (self.peak - self.floor)

    def values(self) -> dict[str, object]:
        """The numbers that the rate depends on, by name: schedules with the same have the same rates."""
        style, unit = self.decay.style, self.unit
        given = self.warmup.as_given or WarmupLength(self.warmup.length, unit)
        values: dict[str, object] = {"peak": self.peak, "decay style": style}
        if given.length:
            values["warmup"] = f"{_length(given.length, given.unit)} from {self.warmup.start}"
        if style == "constant":
            return values
        values |= {"minimum": self.floor, "decay length": _length(self.decay.length, unit)}
        if self.warmup.as_given:
            values["end of the warmup"] = _length(self.warmup.length, unit)
        if style == "WSD":
            values["final decay"] = (
                f"{self.decay.final_style} over {_length(self.decay.final_length or 0, unit)}"
            )
        elif self.decay.cycles is not None:
            cycles = self.decay.cycles
            values["cycles"] = f"{_length(cycles.first, unit)}, then {cycles.growth} times as long"
        elif style == "inverse-square-root" and self.warmup.length * self.samples_per_unit < 1:
            values["batch size"] = self.samples_per_unit
        return values

    def _height(self, count: int) -> float:
        """The height of the rate between floor (0) and peak (1); 1 at the end of the warmup."""
        decay = self.decay
        if decay.style == "WSD":
            assert decay.final_length is not None, "a schedule without it was refused"
            stable_end = decay.length - decay.final_length
            if count <= stable_end:
                return 1.0
            return _descend(decay.final_style, float(count - stable_end) / float(decay.final_length))
        if decay.cycles is not None:
            return _descend("cosine", decay.cycles.share(count - self.warmup.length))
        ratio = float(count - self.warmup.length) / float(decay.length - self.warmup.length)
        return _descend(decay.style, ratio)


def _length(length: float, unit: Unit) -> str:
    return f"{int(length) if length == int(length) else length} {unit}"


def _descend(style: str, ratio: float) -> float:
    """A curve from 1 at ratio 0 to 0 at ratio 1."""
    if style == "linear":
        return 1.0 - ratio
    if style == "cosine":
        return 0.5 * (math.cos(math.pi * ratio) + 1.0)
    if style == "exponential":
        return (2.0 * math.pow(0.5, ratio)) - 1.0
    if style == "minus_sqrt":
        return 1.0 - math.sqrt(ratio)
    raise ConfigError(
        f"The decay style must be linear, cosine, exponential or minus_sqrt, but is {style!r}; change it."
    )


@dataclass(frozen=True)
class WeightDecay:
    """Weight decay that moves from `start` to `end` over `length` units and then stays at `end`.

    Raises:
        ConfigError: `end` is below `start`, or the style is constant and they differ.
    """

    start: float
    end: float
    style: WeightDecayStyle = "constant"
    length: float = 1
    unit: Unit = "iters"

    def __post_init__(self) -> None:
        if self.end < self.start:
            raise ConfigError(
                f"`end_weight_decay` must be at least `start_weight_decay` ({self.start}), but is "
                f"{self.end}; raise it."
            )
        if self.style == "constant" and self.start != self.end:
            raise ConfigError(
                f"`weight_decay_incr_style` must be linear or cosine for a decay that moves from "
                f"{self.start} to {self.end}, but is constant; change it."
            )

    def values(self) -> dict[str, object]:
        """The numbers that the decay depends on, by name."""
        if self.style == "constant":
            return {"weight decay": self.end}
        ramp = f"from {self.start} to {self.end}"
        return {
            "weight decay": ramp,
            "style of the weight decay": self.style,
            "length of the weight decay's ramp": _length(self.length, self.unit),
        }

    def at(self, progress: Progress) -> float:
        """The weight decay of the update that follows `progress`."""
        count = progress.count(self.unit)
        if self.style == "constant" or count > self.length or not self.length:
            return self.end
        ratio = float(count) / float(self.length)
        # cos(pi (1 - r)) and not 1 - descend(cosine, r), which rounds differently from Megatron-Core
        height = ratio if self.style == "linear" else 0.5 * (math.cos(math.pi * (1 - ratio)) + 1.0)
        return self.start + height * (self.end - self.start)


@dataclass(frozen=True)
class UpdateSchedule:
    """The values that change from update to update.

    Attributes:
        learning_rate, weight_decay: the schedules of each.
        decoupled_rate: the schedule of the second parameter group; None if there is one group.
        scalar_peak: the peak rate of the parameters that Muon leaves to another rule; None for Muon's own.
    """

    learning_rate: LearningRate
    weight_decay: WeightDecay
    decoupled_rate: LearningRate | None = None
    scalar_peak: float | None = None

    @classmethod
    def of(cls, optimizer: OptimizerConfig, training_plan: TrainingPlan) -> UpdateSchedule:
        """The schedule of a run.

        Raises:
            ConfigError: the values do not make a schedule.
        """
        return cls(
            build_learning_rate(optimizer, training_plan),
            build_weight_decay(optimizer, training_plan),
            build_decoupled_rate(optimizer, training_plan),
            optimizer.muon_scalar_lr,
        )

    def rates(self, progress: Progress) -> float | tuple[float, float]:
        """The learning rate of each parameter group."""
        rate, other = self.learning_rate.at(progress), self.decoupled_rate
        return rate if other is None else (rate, other.at(progress))

    def values(self) -> dict[str, object]:
        """The numbers that all rates and the decay depend on, by name."""
        values = {
            f"{name} of the learning rate": value for name, value in self.learning_rate.values().items()
        }
        if self.decoupled_rate is not None:
            parts = self.decoupled_rate.values().items()
            values |= {f"{name} of the decoupled learning rate": value for name, value in parts}
        if self.scalar_peak is not None:
            values["`muon_scalar_lr`"] = self.scalar_peak
        return values | self.weight_decay.values()


def build_learning_rate(optimizer: OptimizerConfig, training_plan: TrainingPlan) -> LearningRate:
    """The learning rate schedule of a run.

    Raises:
        ConfigError: the values do not make a schedule.
    """
    return _learning_rate(optimizer, training_plan, optimizer.lr, optimizer.min_lr)


def build_decoupled_rate(optimizer: OptimizerConfig, training_plan: TrainingPlan) -> LearningRate | None:
    """The schedule of the word embedding and the output head; None if theirs is that of the rest.

    Raises:
        ConfigError: the values do not make a schedule.
    """
    peak, floor = decoupled(optimizer)
    if (peak, floor) == (optimizer.lr, optimizer.min_lr):
        return None
    return _learning_rate(optimizer, training_plan, peak, floor)


def _learning_rate(
    optimizer: OptimizerConfig, training_plan: TrainingPlan, peak: float, floor: float
) -> LearningRate:
    lengths, style = training_plan.lr, optimizer.lr_decay_style
    first = getattr(optimizer, f"lr_cycle_{lengths.unit}") if style == "cosine-restarts" else None
    cycles = None if first is None else Cycles(first, optimizer.lr_cycle_mult)
    return LearningRate(
        peak=peak,
        floor=floor,
        warmup=Warmup(lengths.warmup, optimizer.lr_warmup_init, lengths.warmup_as_given),
        decay=Decay(style, lengths.decay, optimizer.lr_wsd_decay_style, lengths.wsd_decay, cycles),
        unit=lengths.unit,
        samples_per_unit=training_plan.steps.ramp.final if lengths.unit == "iters" else 1,
    )


def build_weight_decay(optimizer: OptimizerConfig, training_plan: TrainingPlan) -> WeightDecay:
    """The weight decay schedule of a run; it moves over the samples of the whole training.

    Raises:
        ConfigError: a moving decay lacks its start or end, or a constant one has either.
    """
    style = optimizer.weight_decay_incr_style
    start, finish = optimizer.start_weight_decay, optimizer.end_weight_decay
    if style == "constant":
        if start is not None or finish is not None:
            raise ConfigError(
                f"`start_weight_decay` and `end_weight_decay` must be unset when `weight_decay_incr_style` "
                f"is constant, but are {start} and {finish}; set the style to linear or cosine."
            )
        return WeightDecay(optimizer.weight_decay, optimizer.weight_decay)
    if start is None or finish is None:
        raise ConfigError(
            f"`start_weight_decay` and `end_weight_decay` must be set when `weight_decay_incr_style` is "
            f"{style}, but are {start} and {finish}; set both."
        )
    return WeightDecay(start, finish, style, training_plan.lr.weight_decay, "samples")
