"""The command `megazero finetune`: fine-tune on labelled texts, as finetune.py does."""

from __future__ import annotations

from collections.abc import Sequence

from megazero.config.resolve import resolve_or_exit
from megazero.errors import exit_status
from megazero.train.folders import read_folder


def main(argv: Sequence[str]) -> int:
    """Fine-tune with the flags of a training; returns the exit status."""
    config = resolve_or_exit(argv, "megazero finetune", read_folder)
    # Flags that are refused, and help, need not wait for torch.
    from megazero.train.finetuning.run import finetune

    return exit_status(lambda: finetune(config))
