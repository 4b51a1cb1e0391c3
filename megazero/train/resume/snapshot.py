"""`Snapshots`: saves a run's checkpoints, with their facts."""

from __future__ import annotations

import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from megazero.checkpoint.disk import Disk
from megazero.checkpoint.folder import Retention
from megazero.checkpoint.part import Part
from megazero.checkpoint.saver import Saver
from megazero.config.training_plan import TrainingPlan
from megazero.config.tree.config import Config
from megazero.errors import NumericsError
from megazero.mpu.context import ParallelContext
from megazero.mpu.messages import first_value
from megazero.mpu.transports import transports
from megazero.train.resume.facts import PRETRAINING
from megazero.train.resume.keepers import ALL, StateGroup, keepers_of
from megazero.train.step.engine import Engine
from megazero.train.step.state import TrainState
from megazero.version import VERSION


class Snapshots:
    """Saves a run's state to `--save`, synchronously or in the background.

    Attributes:
        saver: writes and settles the checkpoints; the owner must close it.

    Raises:
        CheckpointError: on every rank: the folder cannot be written, or another job writes there.
    """

    def __init__(
        self,
        config: Config,
        training_plan: TrainingPlan,
        engine: Engine,
        context: ParallelContext,
        vocab_size: int,
        stream_seed: int,
        disk: Disk | None = None,
    ):
        section = config.checkpoint
        assert section.save is not None, "a run that saves has a folder"
        self.config = config
        self.engine = engine
        self.context = context
        self.saver = Saver(
            section.save,
            context,
            disk,
            Retention(section.kept_last, section.save_retain_interval),
            section.async_save_limit if section.async_save else 0,
        )
        self._arguments = training_plan, engine, context, vocab_size, stream_seed
        self._fixed: dict[str, object] = {
            "kind": PRETRAINING,
            "vocab_size": vocab_size,
            "stream_seed": stream_seed,
            "global_batch_size": training_plan.steps.ramp.final,
            "lengths": asdict(training_plan.lr),
            "origin": asdict(training_plan.steps.began),
            "written_by": {
                "world_size": context.world_size,
                "transports": transports(context),
                "megazero": VERSION,
                "git": git_revision() if context.rank == 0 else None,
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
        }

    def elsewhere(self, changes: Mapping[str, object], disk: Disk | None = None) -> Snapshots:
        """Make snapshots of the same run with changes to the `checkpoint` section."""
        section = self.config.checkpoint.model_copy(update=changes)
        return Snapshots(self.config.model_copy(update={"checkpoint": section}), *self._arguments, disk)

    def note(self, facts: Mapping[str, object]) -> None:
        """Add JSON facts to all later checkpoints."""
        self._fixed |= facts

    def save(self, state: TrainState, extras: Mapping[str, object] | None = None) -> list[int]:
        """Save `state` and the engine, or start saving them in the background; every rank calls this.

        Args:
            extras: further facts for the checkpoint, as JSON, such as the accuracy of its model.

        Returns:
            The iterations of the checkpoints that became visible.

        Raises:
            CheckpointError: on every rank: this checkpoint or an earlier one in progress cannot be saved.
            NumericsError: on every rank: a number of the state is not finite; nothing is written.
        """
        section, engine = self.config.checkpoint, self.engine
        moments = not section.no_save_optim
        omitted = {StateGroup.UPDATES: section.no_save_optim, StateGroup.RANDOM: section.no_save_rng}
        keepers = keepers_of(engine, {group for group in ALL if not omitted.get(group)})
        parts = [part for keeper in keepers for part in keeper.parts()]
        # Before writing, because a broken checkpoint would make retention delete an intact one.
        self._check_finite(parts, state.iteration)
        facts = {
            **self._fixed,
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "config": self.config.model_dump(mode="json"),
            "state": state.record(),
            "scaler": asdict(engine.scaler_state) if moments else None,
            "updates": engine.optimizer.updates if moments else None,
            **(extras or {}),
        }
        return self.saver.save(state.iteration, parts, facts)

    def _check_finite(self, parts: Sequence[Part], iteration: int) -> None:
        numbers = [part for part in parts if part.tensor.is_floating_point()]
        # A sum is inf or NaN if any element is, so the host waits for the device once. Large finite
        # elements can overflow the sum, so only then are elements checked.
        sums = [part.tensor.sum(dtype=torch.float32).to(self.context.device) for part in numbers]
        sound = torch.stack(sums).isfinite().tolist() if sums else []
        doubtful = [part for part, well in zip(numbers, sound, strict=True) if not well]
        bad = next((str(part.key) for part in doubtful if not part.tensor.isfinite().all()), None)
        first = first_value(self.context.world, bad, self.context.device)
        if first is not None:
            rank, key = first
            raise NumericsError(
                f"`{key}` must be finite to be saved, but rank {rank} holds inf or NaN after iteration "
                f"{iteration}; earlier checkpoints are kept: resume from the last one"
            )


def git_revision() -> str | None:
    """The git revision of the entry script's working tree, marked if modified; None without one."""
    folder = Path(sys.argv[0]).resolve().parent if sys.argv and sys.argv[0] else Path.cwd()
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        described = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return described.stdout.strip() or None
