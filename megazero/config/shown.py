"""The configuration as `--check-config` shows it, with the values that follow from others filled in."""

from __future__ import annotations

from megazero.config.derive import PipelineShape, data_parallel_size, filled_model, padded_vocab_size
from megazero.config.document import to_yaml
from megazero.config.steps import BatchRamp
from megazero.config.training_plan import TrainingPlan, WarmupLength, training_plan_of
from megazero.config.tree.config import Config


def shown_config(config: Config, world_size: int) -> str:
    """Return a YAML document of the same run on `world_size` ranks, with derived facts as comments.

    A setting that stays null is off, or not determined by the configuration.
    """
    replicas = data_parallel_size(config, world_size)
    if config.finetune.task is not None:  # the length follows from files that are not read here
        facts = _layout(config, world_size) + _vocabulary(config)
        sizes = BatchRamp.of(config.batch, config.model, replicas)
        return _comments(facts) + to_yaml(_filled(config, sizes.final))
    training_plan = training_plan_of(config, replicas)
    facts = [*_layout(config, world_size), *_lengths(training_plan), *_vocabulary(config)]
    return _comments(facts) + to_yaml(filled(config, training_plan))


def filled(config: Config, training_plan: TrainingPlan) -> Config:
    """Write out a run's derived sizes and lengths."""
    lengths = training_plan.lr
    sized = _filled(config, training_plan.steps.ramp.final)
    decay = config.optimizer.model_copy(update={f"lr_decay_{lengths.unit}": lengths.decay})
    return sized.model_copy(update={"optimizer": decay})


def _filled(config: Config, global_batch_size: int) -> Config:
    """Write out a run's derived sizes."""
    changes: dict[str, dict[str, object]] = {
        "parallel": {"pipeline_schedule": PipelineShape.of(config).kind},
        "batch": {"global_batch_size": global_batch_size},
        "checkpoint": {"keep_last": config.checkpoint.kept_last},
    }
    sections = {name: getattr(config, name).model_copy(update=values) for name, values in changes.items()}
    return config.model_copy(update={"model": filled_model(config.model), **sections})


def _comments(lines: list[str]) -> str:
    return "".join(f"# {line}\n" for line in lines)


def _layout(config: Config, world_size: int) -> list[str]:
    parallel = config.parallel
    return [
        f"world size {world_size}: tensor {parallel.tensor_model_parallel_size} x pipeline "
        f"{parallel.pipeline_model_parallel_size} x context {parallel.context_parallel_size} x data parallel "
        f"{data_parallel_size(config, world_size)}"
    ]


def _lengths(training_plan: TrainingPlan) -> list[str]:
    ramp = training_plan.steps.ramp
    lines = [
        f"one step: {ramp.final} samples; "
        f"micro-batches on each replica: {ramp.final // training_plan.steps.unit}",
        f"the training: {training_plan.end.iteration} iterations, {training_plan.end.samples} samples, "
        f"{training_plan.end.tokens} tokens",
    ]
    if ramp.increments:
        lines[0] += f"; a ramp starts at {ramp.start} samples"
    lengths = training_plan.lr
    warmup = lengths.warmup_as_given or WarmupLength(lengths.warmup, lengths.unit)
    lines.append(
        f"learning rate: warmup over {_plain(warmup.length)} {warmup.unit}, "
        f"decay until {lengths.decay} {lengths.unit}"
    )
    return lines


def _vocabulary(config: Config) -> list[str]:
    model, ranks = config.model, config.parallel.tensor_model_parallel_size
    if model.vocab_size is None:
        return []
    size = model.vocab_size + model.extra_vocab_size
    return [f"vocabulary: {padded_vocab_size(size, model, ranks)} rows, padded from {size}"]


def _plain(length: float) -> str:
    return str(int(length)) if length == int(length) else f"{length:.1f}"
