"""The best epoch's model: one checkpoint of weights in `SAVE/best`, replaced when a later epoch is better."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megazero.checkpoint.disk import Disk
from megazero.checkpoint.folder import candidates, iteration_folder, remove_checkpoint, saved_iterations
from megazero.checkpoint.reader import CheckpointReader
from megazero.checkpoint.saver import together
from megazero.train.resume.keepers import keepers_of
from megazero.train.resume.saved import Checkpoint
from megazero.train.resume.snapshot import Snapshots
from megazero.train.step.state import TrainState

FOLDER = "best"


@dataclass(frozen=True)
class BestScore:
    """The accuracy of the model after an iteration."""

    iteration: int
    accuracy: float


class BestModel:
    """Saves the model with the highest accuracy; of equal ones the first.

    Args:
        iteration: the iteration at which the run begins; later models are ignored.

    Raises:
        CheckpointError: on every rank: the folder cannot be read.
    """

    def __init__(self, folder: Path, snapshots: Snapshots, iteration: int, disk: Disk | None = None):
        self.folder = folder
        self.snapshots = snapshots
        self.engine = snapshots.engine
        self.context = context = snapshots.context
        self.disk = disk or Disk()
        look = partial(_marked, folder) if context.rank == 0 else None
        seen = together(context, look, f"look into {folder}")
        self.score = BestScore(*seen) if seen and seen[0] <= iteration else None

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
        return cls(folder, run.elsewhere(changes, disk), iteration, disk)

    def offer(self, state: TrainState, accuracy: float) -> bool:
        """Save the engine's weights if they are the best so far, and return whether; every rank calls this.

        Raises:
            CheckpointError: on every rank: they cannot be saved; the previous best stays.
        """
        if self.score is not None and accuracy <= self.score.accuracy:
            return False
        self.snapshots.save(state, {"accuracy": accuracy})
        self.score = BestScore(state.iteration, accuracy)

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


def _marked(folder: Path) -> tuple[int, float] | None:
    """The iteration and accuracy of the model in a folder; None without one."""
    folders = candidates(folder).folders
    if not folders:
        return None
    reader = CheckpointReader(folders[0])
    accuracy = reader.facts.get("accuracy")
    return None if accuracy is None else (reader.manifest.iteration, float(accuracy))
