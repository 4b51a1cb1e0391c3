"""checkpoint: saving and resuming. `simple.py` writes one file per model slice, bound to its layout."""

from megazero.checkpoint.simple import (
    Snapshot,
    iteration_folder,
    latest_iteration,
    read_facts,
    read_tensors,
    save_checkpoint,
)

__all__ = [
    "Snapshot",
    "iteration_folder",
    "latest_iteration",
    "read_facts",
    "read_tensors",
    "save_checkpoint",
]
