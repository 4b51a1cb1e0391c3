"""What follows from the configuration: pipeline chunks, batch sizes over time, lengths in every unit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from megazero.config.tree import Config, ModelConfig
from megazero.errors import ConfigError

Unit = Literal["iters", "samples", "tokens"]

UNITS: tuple[Unit, ...] = ("iters", "samples", "tokens")


# Settings whose default follows from others, and what they come to.
_RESOLVED = MappingProxyType(
    {
        "ffn_hidden_size": "ffn_size",
        "num_query_groups": "kv_heads",
        "kv_channels": "head_dim",
        "max_position_embeddings": "positions",
    }
)


def model_differences(a: ModelConfig, b: ModelConfig, fields: Iterable[str]) -> list[tuple[str, Any, Any]]:
    """(field, value in a, value in b) of those of these fields that differ once defaults are filled in."""
    found = []
    for field in fields:
        ours, theirs = (getattr(model, _RESOLVED.get(field, field)) for model in (a, b))
        if ours != theirs:
            found.append((field, ours, theirs))
    return found


def data_parallel_size(config: Config, world_size: int) -> int:
    """Replicas of the model: world size / (tensor x pipeline x context). Raises ConfigError if no integer."""
    ranks = model_ranks(config)
    if world_size < 1 or world_size % ranks:
        raise ConfigError(
            f"`world_size` must be a multiple of tensor x pipeline x context parallel size ({ranks}), "
            f"but is {world_size}; start a multiple of {ranks} ranks."
        )
    return world_size // ranks


def model_ranks(config: Config) -> int:
    """Ranks of one replica."""
    sizes = config.parallel
    return sizes.tensor_model_parallel_size * sizes.pipeline_model_parallel_size * sizes.context_parallel_size


def chunks_per_stage(config: Config) -> int:
    """Model chunks (virtual stages) that each pipeline stage holds: one unless set; two with zb-v."""
    parallel = config.parallel
    if parallel.pipeline_schedule == "zb-v":
        return 2
    if parallel.num_virtual_stages_per_pipeline_rank is not None:
        return parallel.num_virtual_stages_per_pipeline_rank
    if parallel.num_layers_per_virtual_pipeline_stage is None:
        return 1
    layers_of_a_round = parallel.pipeline_model_parallel_size * parallel.num_layers_per_virtual_pipeline_stage
    return max(1, config.model.num_layers // layers_of_a_round)


def num_chunks(config: Config) -> int:
    """Model chunks of the whole pipeline."""
    return config.parallel.pipeline_model_parallel_size * chunks_per_stage(config)


def schedule_kind(config: Config) -> str:
    """The pipeline schedule by name; auto is interleaved with several chunks per stage, else 1f1b."""
    kind = config.parallel.pipeline_schedule
    if kind != "auto":
        return kind
    return "interleaved" if chunks_per_stage(config) > 1 else "1f1b"


def padded_vocab_size(vocab_size: int, divisible_by: int, tensor_parallel_size: int) -> int:
    """Rows of the embedding table: the least multiple of `divisible_by` x tensor-parallel size that fits."""
    multiple = divisible_by * tensor_parallel_size
    return -(-vocab_size // multiple) * multiple


def global_batch_size(config: Config, data_parallel_size: int) -> int:
    """Samples of one optimizer step, after any ramp-up."""
    return config.batch.global_batch_size or config.batch.micro_batch_size * data_parallel_size


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
        """No ramp."""
        return cls(start=size, increment=1, ramp_samples=1, final=size)

    @property
    def rungs(self) -> int:
        """How many times the batch grows."""
        return (self.final - self.start) // self.increment

    def at(self, consumed_samples: int) -> int:
        """The global batch size of the step that starts after `consumed_samples`."""
        rung = min(self.rungs, consumed_samples * self.rungs // self.ramp_samples)
        return self.final if rung == self.rungs else self.start + rung * self.increment

    def stretches(self) -> Iterator[tuple[int, int | None]]:
        """(batch size, iterations it is held for) in order; the last is held without end: None."""
        consumed = 0
        for rung in range(self.rungs):
            size = self.start + rung * self.increment
            boundary = -(-(rung + 1) * self.ramp_samples // self.rungs)
            held = max(0, -(-(boundary - consumed) // size))
            consumed += held * size
            yield size, held
        yield self.final, None

    def samples_after(self, iterations: int) -> int:
        """Samples consumed by the first `iterations` steps."""
        consumed = 0
        for size, held in self.stretches():
            steps = iterations if held is None else min(held, iterations)
            consumed += steps * size
            iterations -= steps
        return consumed

    def iterations_within(self, samples: int) -> int:
        """Whole steps that `samples` suffice for."""
        return self._iterations(samples)[0]

    def iterations_reaching(self, samples: int) -> int:
        """Steps after which at least `samples` are consumed."""
        whole, rest = self._iterations(samples)
        return whole + (rest > 0)

    def _iterations(self, samples: int) -> tuple[int, int]:
        steps = 0
        for size, held in self.stretches():
            take = samples // size if held is None else min(held, samples // size)
            steps += take
            samples -= take * size
            if held is None or take < held:
                break
        return steps, samples


def batch_ramp(config: Config, data_parallel_size: int) -> BatchRamp:
    """The ramp of `--rampup-batch-size`, or a constant batch."""
    final = global_batch_size(config, data_parallel_size)
    if config.batch.rampup_batch_size is None:
        return BatchRamp.constant(final)
    start, increment, ramp_samples = config.batch.rampup_batch_size
    return BatchRamp(start, increment, ramp_samples, final)


def num_micro_batches(config: Config, consumed_samples: int, data_parallel_size: int) -> int:
    """Micro-batches that each replica accumulates in the step that starts after `consumed_samples`."""
    size = batch_ramp(config, data_parallel_size).at(consumed_samples)
    return size // (config.batch.micro_batch_size * data_parallel_size)


@dataclass(frozen=True)
class TrainLength:
    """The length of the training in each unit, as the steps that will really be taken."""

    iterations: int
    samples: int
    tokens: int


def train_length(config: Config, data_parallel_size: int) -> TrainLength:
    """Where training stops: at whichever of the given limits comes first.

    `train_samples` counts whole steps only; `train_tokens` is reached by the last step, as in
    Megatron-DeepSpeed. Raises ConfigError if no limit is set.
    """
    ramp = batch_ramp(config, data_parallel_size)
    training, seq_length = config.training, config.model.seq_length
    limits = []
    if training.train_iters is not None:
        limits.append(training.train_iters)
    if training.train_samples is not None:
        limits.append(ramp.iterations_within(training.train_samples))
    if training.train_tokens is not None:
        limits.append(ramp.iterations_reaching(-(-training.train_tokens // seq_length)))
    if not limits:
        raise ConfigError("`train_iters`, `train_samples` or `train_tokens` must be set, but none is.")
    iterations = min(limits)
    samples = ramp.samples_after(iterations)
    return TrainLength(iterations, samples, samples * seq_length)


@dataclass(frozen=True)
class LrLengths:
    """Lengths of the learning rate schedule, all counted in `unit`.

    A warmup that is a fraction of the decay may be no whole number; `wsd_decay` is None without WSD.
    """

    unit: Unit
    warmup: float
    decay: int
    wsd_decay: int | None


def lr_unit(config: Config) -> Unit:
    """What the learning rate schedule counts: the unit its lengths are given in, else the training's."""
    values = config.optimizer
    for stem in ("lr_decay", "lr_wsd_decay", "lr_warmup"):
        for unit in UNITS:
            if getattr(values, f"{stem}_{unit}"):
                return unit
    training = config.training
    if training.train_iters is not None:
        return "iters"
    return "samples" if training.train_samples is not None else "tokens"


def lr_lengths(config: Config, data_parallel_size: int) -> LrLengths:
    """Warmup and decay lengths in one unit; a decay that is not given spans the training."""
    values, unit = config.optimizer, lr_unit(config)
    decay = getattr(values, f"lr_decay_{unit}")
    if decay is None:
        length = train_length(config, data_parallel_size)
        decay = {"iters": length.iterations, "samples": length.samples, "tokens": length.tokens}[unit]
    if values.lr_warmup_fraction is not None:
        warmup = values.lr_warmup_fraction * decay
    else:
        warmup = getattr(values, f"lr_warmup_{unit}")
    wsd_decay = getattr(values, f"lr_wsd_decay_{unit}") if values.lr_decay_style == "WSD" else None
    return LrLengths(unit, warmup, decay, wsd_decay)
