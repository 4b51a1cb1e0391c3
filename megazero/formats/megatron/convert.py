"""Imports a Megatron checkpoint, its weights or its whole run, as a megazero checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megazero.checkpoint.folder import saved_iterations
from megazero.checkpoint.writer import later_weights, write_checkpoint
from megazero.config.tree.config import Config
from megazero.config.tree.model import ModelConfig
from megazero.config.tree.tokenizer import TokenizerConfig
from megazero.errors import CheckpointError
from megazero.formats.hf.convert import KIND
from megazero.formats.megatron.arguments import SECTIONS
from megazero.formats.megatron.dialects import Arguments
from megazero.formats.megatron.reader import MegatronReader
from megazero.formats.megatron.stages import Header

_RUN = "pretraining"  # the kind of checkpoint that a run resumes from


def import_megatron(
    reader: MegatronReader, directory: str | Path, tokenizer: TokenizerConfig | None = None
) -> Path:
    """Write a checkpoint with the weights, in fp32, one tensor in memory at a time.

    Its iteration is 0, or the run's if the optimizer's state is imported too.

    Args:
        reader: the weights to import.
        directory: the run's folder for the checkpoint.
        tokenizer: the tokenizer that the model was trained with; None takes the reader's, if it has one.

    Raises:
        CheckpointError: the folder has a checkpoint already, or cannot be written.
    """
    if saved := saved_iterations(directory):
        raise CheckpointError(
            f"`{directory}` must have no checkpoint yet, but has one of iteration {saved[-1]}; name "
            f"another folder"
        )

    tokenizer = tokenizer or reader.tokenizer or TokenizerConfig()
    iteration = 0
    facts = weight_facts(reader, tokenizer)
    if reader.options.with_optimizer:
        facts = run_facts(reader.header, reader.arguments, reader.model, tokenizer)
        iteration = facts["state"]["iteration"]
    facts["converted_from"] = {
        "format": reader.files.form.value,
        "iteration": reader.iteration,
        "checkpoint_version": reader.checkpoint_version,
    }
    return write_checkpoint(directory, iteration, later_weights(reader), facts)


def weight_facts(reader: MegatronReader, tokenizer: TokenizerConfig | None = None) -> dict[str, Any]:
    """The facts of a checkpoint with the reader's weights alone; `tokenizer` as in `import_megatron`."""
    return {
        "kind": KIND,
        "model": reader.model_settings(),
        "vocab_size": reader.model.vocab_size,
        "tokenizer": (tokenizer or reader.tokenizer or TokenizerConfig()).model_dump(mode="json"),
    }


def run_facts(
    header: Header, arguments: Arguments, model: ModelConfig, tokenizer: TokenizerConfig
) -> dict[str, Any]:
    """The facts of a checkpoint from which a run can resume.

    Args:
        header: the checkpoint's content besides tensors.
        arguments: Megatron's arguments, with the user's corrections.
        model: the model, with the vocabulary.
        tokenizer: the run's tokenizer.

    Raises:
        CheckpointError: the run's progress is unknown, or it has settings that megazero lacks.
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
    counts = header.numbers.get("num_steps", ())  # despite the name, in samples
    made = int(counts[0]) if counts else samples - skipped * (config.batch.global_batch_size or 0)
    return {
        "kind": _RUN,
        "vocab_size": model.vocab_size,
        "stream_seed": config.training.seed,
        "global_batch_size": config.batch.global_batch_size,
        "config": config.model_dump(mode="json"),
        "state": {
            "iteration": iteration,
            "consumed_samples": samples,
            "consumed_tokens": tokens,
            "skipped": skipped,
            # Megatron's schedule counts the samples of updates alone; in Megatron-DeepSpeed a schedule in
            # tokens counts those of skipped steps too.
            "not_updated": {"iteration": skipped, "samples": samples - min(samples, made), "tokens": 0},
        },
        "scaler": _scaler(header),
        "updates": _updates(header),
    }


def _config(arguments: Arguments, model: ModelConfig, tokenizer: TokenizerConfig) -> Config:
    sections: dict[str, object] = {
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


def _scaler(header: Header) -> dict[str, float]:
    """The state of the loss scale; scale 1 if the checkpoint has none, as for bf16."""
    names = {"scale": "scale", "growth_tracker": "growth_tracker", "hysteresis_tracker": "hysteresis_left"}
    counts = dict.fromkeys(("growth_tracker", "hysteresis_left", "overflows_at_floor"), 0)
    state: dict[str, float] = {"scale": 1.0, **counts}
    for theirs, ours in names.items():
        for value in header.numbers.get(theirs, ()):
            state[ours] = value if ours == "scale" else int(value)
    return state
