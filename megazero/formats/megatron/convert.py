"""Megatron's weights -> a megazero checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megazero.checkpoint.folder import saved_iterations
from megazero.checkpoint.writer import later_weights, write_checkpoint
from megazero.config.tree.tokenizer import TokenizerConfig
from megazero.errors import CheckpointError
from megazero.formats.hf.convert import KIND
from megazero.formats.megatron.progress import run_facts
from megazero.formats.megatron.reader import MegatronReader


def import_megatron(
    reader: MegatronReader, directory: str | Path, tokenizer: TokenizerConfig | None = None
) -> Path:
    """Write a checkpoint with the weights, in fp32, one tensor in memory at a time.

    It is of iteration 0, or of that of the run, if the optimizer's state is taken too.

    Args:
        reader: the weights to import.
        directory: the run folder for the checkpoint.
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
    facts: dict[str, Any] = {
        "kind": KIND,
        "model": reader.model_settings(),
        "vocab_size": reader.model.vocab_size,
        "tokenizer": tokenizer.model_dump(mode="json"),
    }
    if reader.options.with_optimizer:
        facts = run_facts(reader.header, reader.arguments, reader.model, tokenizer)
        iteration = facts["state"]["iteration"]
    facts["converted_from"] = {
        "format": reader.files.form.value,
        "iteration": reader.iteration,
        "checkpoint_version": reader.checkpoint_version,
    }
    return write_checkpoint(directory, iteration, later_weights(reader), facts)
