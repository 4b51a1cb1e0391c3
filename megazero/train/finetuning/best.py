"""The best epoch's model: one checkpoint of weights in `SAVE/best`, replaced when a later epoch is better."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megazero.checkpoint.disk import Disk
from megazero.checkpoint.folder import candidates, iteration_folder, remove_checkpoint, saved_iterations
from megazero.checkpoint.reader import CheckpointReader
from megazero.checkpoint.saver import together
from megazero.mpu.messages import broadcast_value
from megazero.train.resume.keepers import keepers_of
from megazero.train.resume.saved import Checkpoint
from megazero.train.resume.snapshot import Snapshots
from megazero.train.step.state import TrainState

FOLDER = "best"
_LESS_IS_BETTER = frozenset({"loss"})


@dataclass(frozen=True)
class BestScore:
    """How good the model after an iteration is, by the figure that `--best-metric` names."""

    iteration: int
    metric: str
    value: float

    def beats(self, other: BestScore | None) -> bool:
        """Whether this is better; as good is not, and neither is a figure that is no number."""
        if other is None:
            return not math.isnan(self.value)
        return self.value < other.value if self.metric in _LESS_IS_BETTER else self.value > other.value

    def __str__(self) -> str:
        return f"{self.metric.replace('_f1', ' F1')} {self.value:.4f}"


class BestModel:
    """Saves the best model by one figure; of equal ones the first.

    Args:
        iteration: the iteration at which the run begins; later models are ignored.

    Raises:
        CheckpointError: on every rank: the folder cannot be read.
    """

    def __init__(self, folder: Path, snapshots: Snapshots, iteration: int):
        self.metric: str = snapshots.config.finetune.best_metric
        self.folder = folder
        self.snapshots = snapshots
        self.engine = snapshots.engine
        self.context = context = snapshots.context
        self.disk = snapshots.saver.disk
        look = partial(_marked, folder, self.metric) if context.rank == 0 else None
        seen = together(context, look, f"look into {folder}")
        self.score = BestScore(seen[0], self.metric, seen[1]) if seen and seen[0] <= iteration else None

    @classmethod
    def of(cls, run: Snapshots, iteration: int, disk: Disk | None = None) -> BestModel:
        """Make the best model of a run that begins at `iteration`, in the run's folder."""
        folder = Path(run.saver.directory) / FOLDER
        changes = {
            "save": str(folder),
            "async_save": False,
            "no_save_optim": True,
            "no_save_rng": True,
            "keep_last": None,
            "save_retain_interval": None,
        }
        return cls(folder, run.elsewhere(changes, disk), iteration)

    def offer(self, state: TrainState, figures: Mapping[str, float | None]) -> bool:
        """Save the engine's weights if they are the best so far, and return whether; every rank calls this.

        Args:
            figures: the figures of their evaluation, of which `metric` decides. All are saved, so that a run
                that goes on may choose by another.

        Raises:
            CheckpointError: on every rank: they cannot be saved; the previous best stays.
        """
        value = figures[self.metric]
        score = BestScore(state.iteration, self.metric, math.nan if value is None else value)
        # One rank decides, since a loss may be rounded differently on another.
        if not broadcast_value(self.context.world, score.beats(self.score), self.context.device):
            return False
        self.snapshots.save(state, {**figures, "best_metric": self.metric})
        self.score = score

        def clear() -> None:
            for iteration in saved_iterations(self.folder):
                if iteration != state.iteration:
                    remove_checkpoint(self.disk, self.folder, iteration)

        together(self.context, clear if self.context.rank == 0 else None, f"clear {self.folder}")
        return True

    def take(self) -> None:
        """Load the best weights into the engine; every rank calls this."""
        assert self.score is not None, "no model has been offered"
        path = iteration_folder(self.folder, self.score.iteration)
        reader, keepers = Checkpoint.opened(path, "full", self.context), keepers_of(self.engine, ())

        def read() -> None:
            reader.read([part for keeper in keepers for part in keeper.parts_from(reader)])

        together(self.context, read, f"load {path}")
        for keeper in keepers:
            keeper.apply(reader, path)

    def close(self) -> None:
        """Release the folder for other jobs."""
        self.snapshots.saver.close()


def _marked(folder: Path, metric: str) -> tuple[int, float] | None:
    """The iteration of the model in a folder, and its figure; None without one."""
    folders = candidates(folder).folders
    if not folders:
        return None
    reader = CheckpointReader(folders[0])
    value = reader.facts.get(metric)
    return None if value is None else (reader.manifest.iteration, float(value))
