"""The ranks that share a sequence, by the names of ALST's scripts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from megazero.deepspeed.comm.adopt import find_context
from megazero.deepspeed.comm.mpu import DeepSpeedMpu
from megazero.deepspeed.comm.world import process_group
from megazero.deepspeed.config.settings import UserSettings
from megazero.deepspeed.engine.arguments import Mesh
from megazero.mpu.context import ParallelContext


@dataclass(frozen=True)
class SequenceMpu(DeepSpeedMpu):
    """An `mpu` for ranks that share sequences; its groups are torch's, for torch's collectives."""

    def get_data_parallel_group(self) -> Any:
        """Return torch's group of the ranks with other samples and the same piece of the sequence."""
        return process_group(self.context.groups["data"])

    def get_sequence_parallel_group(self) -> Any:
        """Return torch's group of the ranks that share a sequence with this one."""
        return process_group(self.context.groups["cp"])

    def get_sequence_data_parallel_group(self) -> Any:
        """Return torch's group of all ranks that hold the same weights, over which ZeRO shards."""
        return process_group(self.context.groups["replica"])

    def get_sequence_data_parallel_rank(self) -> int:
        """Return this rank in the group of `get_sequence_data_parallel_group`."""
        return self.context.groups["replica"].rank

    def get_sequence_data_parallel_world_size(self) -> int:
        """Return the size of the group of `get_sequence_data_parallel_group`."""
        return self.context.groups["replica"].size


def initialize_sequence_parallel(sequence_parallel_size: int) -> SequenceMpu:
    """Let adjacent ranks share sequences; every rank calls this.

    Returns:
        `mpu` for `initialize`.

    Raises:
        ConfigError: the size does not divide the number of ranks.
    """
    return SequenceMpu(find_context(Mesh(None, sequence_parallel_size)))


def for_sequences(settings: UserSettings, context: ParallelContext) -> UserSettings:
    """Return the settings of an engine whose ranks may share sequences, with a note about the loss."""
    ranks = context.groups["cp"].size
    if ranks == 1:
        return settings
    dtype, notes = settings.extras.ranks.seq_parallel_communication_data_type, settings.notes
    if settings.zero.stage < 3:
        notes = (
            *notes,
            f"gradients are averaged over all {context.replica.size} ranks, including the {ranks} that share "
            "a sequence, over which DeepSpeed sums them at ZeRO 0 to 2. Compute the loss as the mean over "
            "all tokens on every rank (by `torch.distributed.nn.functional.all_gather`, as at ZeRO 3); "
            f"multiply a loss that is summed over these ranks by {ranks}.",
        )
    zero = settings.zero if dtype is None else settings.zero.model_copy(update={"grad_reduce_dtype": dtype})
    return replace(settings, zero=zero, notes=notes)
