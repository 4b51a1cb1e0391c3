"""The ranks that share a sequence, as ALST's scripts set them up and ask for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megazero.deepspeed.adopt import find_context
from megazero.deepspeed.arguments import Mesh
from megazero.deepspeed.comm.world import process_group
from megazero.deepspeed.mpu import DeepSpeedMpu


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
