"""The command `megazero rl`: train a model by policy gradients on its own answers."""

from __future__ import annotations

from collections.abc import Sequence

from megazero.config.resolve import resolve_or_exit
from megazero.errors import exit_status
from megazero.train.folders import read_folder


def main(argv: Sequence[str]) -> int:
    """Train with the flags of a training; returns the exit status."""
    config = resolve_or_exit(argv, "megazero rl", read_folder)
    # Flags that are refused, and help, need not wait for torch.
    from megazero.post_training.policy.run import train_policy

    return exit_status(lambda: train_policy(config))
