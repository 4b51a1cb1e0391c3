"""checkpoint: logical tensors, stored as the shards that ranks own and read in whatever parts a rank needs.

`box` and `part` say what is where, `shards` what a rank holds. `saver` writes a checkpoint over all ranks
(`writer` its files), `reader` reads it; `tensor_file`, `blocks` and `disk` are the storage below, `manifest`
and `folder` what makes files a checkpoint and folders a run's.
"""

from megazero.checkpoint.box import Box
from megazero.checkpoint.disk import Disk
from megazero.checkpoint.folder import (
    Candidates,
    Retention,
    candidates,
    iteration_folder,
    latest_iteration,
    saved_iterations,
)
from megazero.checkpoint.part import FP8, RANDOM, ROUTER, WEIGHT, Key, Part, Source, misfits
from megazero.checkpoint.reader import CheckpointReader, Verify
from megazero.checkpoint.replica_rows import ReplicaRows
from megazero.checkpoint.saver import Saver, together
from megazero.checkpoint.shards import (
    parts_in_use,
    parts_of_parameters,
    parts_to_read,
    parts_to_write,
    state_keys,
)
from megazero.checkpoint.writer import write_checkpoint

__all__ = [
    "FP8",
    "RANDOM",
    "ROUTER",
    "WEIGHT",
    "Box",
    "Candidates",
    "CheckpointReader",
    "Disk",
    "Key",
    "Part",
    "ReplicaRows",
    "Retention",
    "Saver",
    "Source",
    "Verify",
    "candidates",
    "iteration_folder",
    "latest_iteration",
    "misfits",
    "parts_in_use",
    "parts_of_parameters",
    "parts_to_read",
    "parts_to_write",
    "saved_iterations",
    "state_keys",
    "together",
    "write_checkpoint",
]
