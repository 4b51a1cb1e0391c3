"""checkpoint: saving and resuming. `simple.py` writes one file per model slice, bound to its layout."""

from megazero.checkpoint.simple import (
    SliceReader,
    Snapshot,
    iteration_folder,
    latest_iteration,
    read_facts,
    save_checkpoint,
)

__all__ = [
    "SliceReader",
    "Snapshot",
    "iteration_folder",
    "latest_iteration",
    "read_facts",
    "save_checkpoint",
]
