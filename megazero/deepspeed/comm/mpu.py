"""Megatron's `mpu` object, by which DeepSpeed learns the layout of ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from megazero.deepspeed.comm.world import AnyGroup
from megazero.mpu.context import ParallelContext
from megazero.mpu.group import Group


class Mpu(Protocol):
    """The members of an `mpu`, such as Megatron's module, by which norms are taken over a whole model."""

    def get_model_parallel_rank(self) -> int:
        """This rank within the group."""

    def get_model_parallel_group(self) -> AnyGroup:
        """The group of the ranks that hold one whole model."""


@dataclass(frozen=True)
class DeepSpeedMpu(Mpu):
    """A context as the `mpu` of ``deepspeed.initialize``.

    Its model-parallel axis is our `tp`, and its sequence-parallel axis our `cp`.
    """

    context: ParallelContext

    def get_model_parallel_rank(self) -> int:
        return self.context.groups["tp"].rank

    def get_model_parallel_world_size(self) -> int:
        return self.context.groups["tp"].size

    def get_model_parallel_group(self) -> Group:
        return self.context.groups["tp"]

    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_world_size = get_model_parallel_world_size
    get_tensor_model_parallel_group = get_model_parallel_group

    def get_data_parallel_rank(self) -> int:
        return self.context.groups["data"].rank

    def get_data_parallel_world_size(self) -> int:
        return self.context.groups["data"].size

    def get_data_parallel_group(self) -> Group:
        return self.context.groups["data"]

    def get_pipeline_model_parallel_rank(self) -> int:
        return self.context.groups["pp"].rank

    def get_pipeline_model_parallel_world_size(self) -> int:
        return self.context.groups["pp"].size

    def get_pipeline_model_parallel_group(self) -> Group:
        return self.context.groups["pp"]

    def get_sequence_parallel_rank(self) -> int:
        return self.context.groups["cp"].rank

    def get_sequence_parallel_world_size(self) -> int:
        return self.context.groups["cp"].size

    def get_sequence_parallel_group(self) -> Group:
        return self.context.groups["cp"]
