"""The command `megazero pretrain`: train, as pretrain_gpt.py does."""

from __future__ import annotations

from collections.abc import Sequence

from megazero.config.resolve import resolve_or_exit
from megazero.config.tree.config import Config
from megazero.errors import exit_status
from megazero.train.folders import read_folder


def main(argv: Sequence[str]) -> int:
    """Train with the flags of a training; returns the exit status."""
    config = resolve_or_exit(argv, "megazero pretrain", read_folder)
    return exit_status(lambda: train(config))


def train(config: Config) -> None:
    """Pretrain as configured, with what plugs into a training by its settings.

    Raises MegazeroError as `pretrain`.
    """
    # Flags that are refused, and help, need not wait for torch.
    from megazero.train.pretraining import pretrain

    more = None
    if config.training.eval_tasks is not None:
        from megazero.harness.in_training import TaskEvaluations

        more = TaskEvaluations
    pretrain(config, more=more)
