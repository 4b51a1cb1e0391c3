"""The run that a checkpoint of Megatron's belongs to: how far it is, and with which settings it trains."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from megazero.config.tree.config import Config
from megazero.config.tree.model import ModelConfig
from megazero.config.tree.tokenizer import TokenizerConfig
from megazero.errors import CheckpointError
from megazero.formats.megatron.settings import Arguments
from megazero.formats.megatron.stages import Header

KIND = "pretraining"
"""The kind of checkpoint that a run resumes from."""

SECTIONS = ("optimizer", "batch", "training")
"""The sections whose settings decide how a run goes on, besides the model; they have Megatron's names."""


def run_facts(
    header: Header, arguments: Arguments, model: ModelConfig, tokenizer: TokenizerConfig
) -> dict[str, Any]:
    """The facts of a checkpoint that a run can go on from.

    Args:
        header: what the checkpoint says besides its tensors.
        arguments: Megatron's arguments, corrected.
        model: the model, with the vocabulary.
        tokenizer: the run's tokenizer.

    Raises:
        CheckpointError: it does not say how far the run is, or has settings that ours cannot have.
    """
    samples, iteration = arguments.get("consumed_train_samples"), header.iteration
    if not isinstance(samples, int) or iteration is None:
        raise CheckpointError(
            f"`consumed_train_samples` and the iteration must be known to go on from, but are {samples!r} "
            f"and {iteration}; give the former with --megatron-args, or import without --with-optimizer"
        )
    tokens = arguments.get("consumed_train_tokens") or samples * model.seq_length
    config = _config(arguments, model, tokenizer)
    skipped = max(0, iteration - _updates(header))
    counts = header.numbers.get("num_steps", ())
    made = int(counts[0]) if counts else samples - skipped * (config.batch.global_batch_size or 0)
    return {
        "kind": KIND,
        "vocab_size": model.vocab_size,
        "stream_seed": config.training.seed,
        "global_batch_size": config.batch.global_batch_size,
        "config": config.model_dump(mode="json"),
        "state": {
            "iteration": iteration,
            "consumed_samples": samples,
            "consumed_tokens": tokens,
            "skipped": skipped,
            # Megatron's schedule counts samples of updates, Megatron-DeepSpeed's in tokens counts all.
            "not_updated": {"iteration": skipped, "samples": samples - min(samples, made), "tokens": 0},
        },
        "scaler": _scaler(header),
        "updates": _updates(header),
    }


def _config(arguments: Arguments, model: ModelConfig, tokenizer: TokenizerConfig) -> Config:
    sections: dict[str, Any] = {
        name: {
            field: arguments[field]
            for field in Config.model_fields[name].annotation.model_fields  # type: ignore[union-attr]
            if arguments.get(field) is not None
        }
        for name in SECTIONS
    }
    try:
        config = Config.model_validate({**sections, "model": model, "tokenizer": tokenizer})
    except ValidationError as error:
        wrong = [f"`{'.'.join(map(str, fault['loc'][1:]))}`: {fault['msg']}" for fault in error.errors()]
        raise CheckpointError(
            "Megatron's arguments must tell how the run goes on, but do not: "
            + "; ".join(wrong)
            + "; correct them with --megatron-args, or import without --with-optimizer"
        ) from error
    if config.batch.global_batch_size is None or config.optimizer.optimizer != "adam":
        raise CheckpointError(
            f"`global_batch_size` must be given and `optimizer` must be 'adam' to go on from, but they are "
            f"{config.batch.global_batch_size} and {config.optimizer.optimizer!r}; correct them with "
            f"--megatron-args, or import without --with-optimizer"
        )
    return config


def _updates(header: Header) -> int:
    steps = {value for key in ("step", "common_step") for value in header.numbers.get(key, ())}
    if len(steps) != 1:
        raise CheckpointError(
            f"the optimizer's state must say how many updates it made, but says "
            f"{sorted(steps) or 'nothing'}; import without --with-optimizer"
        )
    return int(steps.pop())


def _scaler(header: Header) -> dict[str, Any]:
    """The loss scale; 1 if none is kept, as for bf16."""
    names = {"scale": "scale", "growth_tracker": "growth_tracker", "hysteresis_tracker": "hysteresis_left"}
    state: dict[str, Any] = {"scale": 1.0, "growth_tracker": 0, "hysteresis_left": 0, "overflows_at_floor": 0}
    for theirs, ours in names.items():
        for value in header.numbers.get(theirs, ()):
            state[ours] = value if ours == "scale" else int(value)
    return state
