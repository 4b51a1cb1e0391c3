"""Saving a run: what goes into its checkpoints, and when they become visible."""

from __future__ import annotations

import platform
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch

import megazero
from megazero.checkpoint import RANDOM, Box, Disk, Key, Part, Retention, Saver, parts_to_write
from megazero.config.derive import global_batch_size
from megazero.config.tree import Config
from megazero.mpu import ParallelContext
from megazero.train.engine import Engine
from megazero.train.facts import PRETRAINING
from megazero.train.random_state import random_state
from megazero.train.state import TrainState


class Snapshots:
    """Saves a run's state to `--save`, in line or in the background.

    Args:
        config: of the run.
        engine: whose state is saved.
        context: all ranks.
        vocab_size: entries of the vocabulary, without padding.
        stream_seed: of the dropout streams.
        disk: what writes.

    Attributes:
        saver: what writes the checkpoints, settles them and is to be closed.

    Raises:
        CheckpointError: on every rank, if the folder cannot be written or another job writes there.
    """

    def __init__(
        self,
        config: Config,
        engine: Engine,
        context: ParallelContext,
        vocab_size: int,
        stream_seed: int,
        disk: Disk | None = None,
    ):
        section = config.checkpoint
        self.config = config
        self.engine = engine
        self.context = context
        self.saver = Saver(
            section.save,
            context,
            disk,
            Retention(section.keep_last, section.save_retain_interval),
            section.async_save_limit if section.async_save else 0,
        )
        self._fixed = {
            "kind": PRETRAINING,
            "vocab_size": vocab_size,
            "stream_seed": stream_seed,
            "global_batch_size": global_batch_size(config, context.data.size),
            "written_by": {
                "world_size": context.world_size,
                "megazero": megazero.__version__,
                "git": git_revision() if context.rank == 0 else None,
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
        }

    def save(self, state: TrainState) -> list[int]:
        """Save a checkpoint of `state` and the engine, or begin to; every rank calls this.

        Returns:
            The iterations of the checkpoints that became visible.

        Raises:
            CheckpointError: on every rank; this checkpoint, or an earlier one on its way, is not there.
        """
        section, engine = self.config.checkpoint, self.engine
        moments = not section.no_save_optim
        parts = parts_to_write(engine.optimizer, self.context, moments=moments)
        if not section.no_save_rng:
            parts += random_parts(self.context)
        facts = {
            **self._fixed,
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "config": self.config.model_dump(mode="json"),
            "state": asdict(state),
            "scaler": asdict(engine.scaler_state) if moments else None,
            "updates": engine.optimizer.updates if moments else None,
        }
        return self.saver.save(state.iteration, parts, facts)


def random_parts(context: ParallelContext) -> list[Part]:
    """The states of this rank's generators, as its rows of tensors over all ranks."""
    parts = []
    for name, state in random_state(context.device).items():
        shape = (context.world_size, *state.shape)
        row = Box((context.rank, *[0] * state.dim()), (1, *state.shape))
        parts.append(Part(Key(name, RANDOM), shape, row, state.unsqueeze(0)))
    return parts


def git_revision() -> str | None:
    """Of the working tree that the entry script lies in, with a mark if it is changed; None without one."""
    folder = Path(sys.argv[0]).resolve().parent if sys.argv and sys.argv[0] else Path.cwd()
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip() or None
