"""The methods that DeepSpeed calls on a Megatron `mpu` object to learn where its rank sits."""

from __future__ import annotations

from collections.abc import Mapping

from megazero.mpu.group import Group


class DeepSpeedMpu:
    """DeepSpeed's mpu contract (``deepspeed.initialize(mpu=...)``), answered from `groups`.

    What it calls model-parallel is our `tp`, and what it calls sequence-parallel our `cp`.
    """

    groups: Mapping[str, Group]

    def get_model_parallel_rank(self) -> int:
        return self.groups["tp"].rank

    def get_model_parallel_world_size(self) -> int:
        return self.groups["tp"].size

    def get_model_parallel_group(self) -> Group:
        return self.groups["tp"]

    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_world_size = get_model_parallel_world_size
    get_tensor_model_parallel_group = get_model_parallel_group

    def get_data_parallel_rank(self) -> int:
        return self.groups["data"].rank

    def get_data_parallel_world_size(self) -> int:
        return self.groups["data"].size

    def get_data_parallel_group(self) -> Group:
        return self.groups["data"]

    def get_pipeline_model_parallel_rank(self) -> int:
        return self.groups["pp"].rank

    def get_pipeline_model_parallel_world_size(self) -> int:
        return self.groups["pp"].size

    def get_pipeline_model_parallel_group(self) -> Group:
        return self.groups["pp"]

    def get_sequence_parallel_rank(self) -> int:
        return self.groups["cp"].rank

    def get_sequence_parallel_world_size(self) -> int:
        return self.groups["cp"].size

    def get_sequence_parallel_group(self) -> Group:
        return self.groups["cp"]
