"""The ranks that share a sequence, as ALST's scripts set them up and ask for them."""

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
    """A context whose ranks share sequences; groups are torch's, so that its own functions take them."""

    def get_data_parallel_group(self) -> Any:
        """Torch's group of the ranks with other samples and the same place in the sequence."""
        return process_group(self.context.groups["data"])

    def get_sequence_parallel_group(self) -> Any:
        """Torch's group of the ranks that share this one's sequences."""
        return process_group(self.context.groups["cp"])

    def get_sequence_data_parallel_group(self) -> Any:
        """Torch's group of all ranks that hold the same weights, over which ZeRO shards."""
        return process_group(self.context.groups["replica"])

    def get_sequence_data_parallel_rank(self) -> int:
        """This rank's number among those."""
        return self.context.groups["replica"].rank

    def get_sequence_data_parallel_world_size(self) -> int:
        """Their number."""
        return self.context.groups["replica"].size


def initialize_sequence_parallel(sequence_parallel_size: int) -> SequenceMpu:
    """Let so many neighbouring ranks share sequences; every rank calls this.

    Returns:
        `mpu` for `initialize`.

    Raises:
        ConfigError: the number does not divide the ranks.
    """
    return SequenceMpu(find_context(Mesh(None, sequence_parallel_size)))


def for_sequences(settings: UserSettings, context: ParallelContext) -> UserSettings:
    """The settings of an engine some of whose ranks share sequences; a note says what loss it is for."""
    ranks = context.groups["cp"].size
    if ranks == 1:
        return settings
    dtype, notes = settings.extras.ranks.seq_parallel_communication_data_type, settings.notes
    if settings.zero.stage < 3:
        notes = (
            *notes,
            f"gradients are means over all {context.replica.size} ranks, also over the {ranks} that share a "
            "sequence, over which DeepSpeed sums them at ZeRO 0 to 2. A loss is right that is the mean over "
            "all tokens on every rank (by `torch.distributed.nn.functional.all_gather`, as at ZeRO 3); "
            f"multiply one that adds up over these ranks by {ranks}.",
        )
    zero = settings.zero if dtype is None else settings.zero.model_copy(update={"grad_reduce_dtype": dtype})
    return replace(settings, zero=zero, notes=notes)
