"""The command `megazero pretrain`: train, as pretrain_gpt.py does."""

from __future__ import annotations

from collections.abc import Sequence

from megazero.config.resolve import resolve_or_exit
from megazero.errors import exit_status
from megazero.train.folders import read_folder


def main(argv: Sequence[str]) -> int:
    """Train with the flags of a training; returns the exit status."""
    config = resolve_or_exit(argv, "megazero pretrain", read_folder)
    # Flags that are refused, and help, need not wait for torch.
    from megazero.train.pretraining import pretrain

    return exit_status(lambda: pretrain(config))
