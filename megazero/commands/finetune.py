"""The command `megazero finetune`: fine-tune a pretrained model, as finetune.py does."""

from __future__ import annotations

from collections.abc import Sequence

from megazero.config.resolve import resolve_or_exit
from megazero.config.tree.finetune import OF_ANSWERS
from megazero.errors import exit_status
from megazero.train.folders import read_folder


def main(argv: Sequence[str], program: str = "megazero finetune") -> int:
    """Fine-tune with the flags of a training; returns the exit status."""
    config = resolve_or_exit(argv, program, read_folder)
    # Flags that are refused, and help, need not wait for torch.
    if config.finetune.task in OF_ANSWERS:
        from megazero.post_training.run import post_train

        return exit_status(lambda: post_train(config))
    from megazero.train.finetuning.run import finetune

    return exit_status(lambda: finetune(config))
