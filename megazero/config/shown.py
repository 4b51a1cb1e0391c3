"""The configuration as `--check-config` shows it: with the values that follow from others filled in."""

from __future__ import annotations

from typing import Any

from megazero.config.derive import (
    data_parallel_size,
    filled_model,
    padded_vocab_size,
    schedule_kind,
)
from megazero.config.document import to_yaml
from megazero.config.horizon import Horizon, Rise, horizon_of
from megazero.config.tree import Config


def shown_config(config: Config, world_size: int) -> str:
    """A YAML document that means the same on this number of ranks, with what has no key as comments.

    Settings that are still null are off, or nothing in the configuration determines them.
    """
    horizon = horizon_of(config, data_parallel_size(config, world_size))
    return "".join(f"# {line}\n" for line in _facts(config, world_size, horizon)) + to_yaml(
        filled(config, horizon)
    )


def filled(config: Config, horizon: Horizon) -> Config:
    """The same run with its derived sizes and lengths written out."""
    lengths = horizon.lr
    changes: dict[str, dict[str, Any]] = {
        "parallel": {"pipeline_schedule": schedule_kind(config)},
        "batch": {"global_batch_size": horizon.steps.ramp.final},
        "optimizer": {f"lr_decay_{lengths.unit}": lengths.decay},
        "checkpoint": {"keep_last": config.checkpoint.kept_last},
    }
    sections = {name: getattr(config, name).model_copy(update=each) for name, each in changes.items()}
    return config.model_copy(update={"model": filled_model(config.model), **sections})


def _facts(config: Config, world_size: int, horizon: Horizon) -> list[str]:
    parallel, model, ramp = config.parallel, config.model, horizon.steps.ramp
    lines = [
        f"world size {world_size}: tensor {parallel.tensor_model_parallel_size} x pipeline "
        f"{parallel.pipeline_model_parallel_size} x context {parallel.context_parallel_size} x data parallel "
        f"{data_parallel_size(config, world_size)}",
        f"one step: {ramp.final} samples; micro-batches on each replica: {ramp.final // horizon.steps.unit}",
        f"the training: {horizon.end.iteration} iterations, {horizon.end.samples} samples, "
        f"{horizon.end.tokens} tokens",
    ]
    if ramp.rungs:
        lines[1] += f"; a ramp starts at {ramp.start} samples"
    lengths = horizon.lr
    rise = lengths.rise or Rise(lengths.warmup, lengths.unit)
    lines.append(
        f"learning rate: warmup over {_plain(rise.length)} {rise.unit}, decay until {lengths.decay} "
        f"{lengths.unit}"
    )
    if model.vocab_size is not None:
        rows = padded_vocab_size(
            model.vocab_size, model.make_vocab_size_divisible_by, parallel.tensor_model_parallel_size
        )
        lines.append(f"vocabulary: {rows} rows, padded from {model.vocab_size}")
    return lines


def _plain(length: float) -> str:
    return str(int(length)) if length == int(length) else f"{length:.1f}"
