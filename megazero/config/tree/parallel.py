"""The section `parallel`: the layout of ranks, and their communication."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, PositiveInt

from megazero.config.condition import config, here, when
from megazero.config.tree.option import Patience, Section, option

CommType = Literal["p2p", "a2a", "all_gather", "a2a+p2p"]


def _listed(value: object) -> object:
    """Make a list of one word."""
    return (value,) if isinstance(value, str) else value


CommTypes = Annotated[tuple[CommType, ...], BeforeValidator(_listed), Field(min_length=1)]


class ParallelConfig(Section):
    """Parallelism"""

    tensor_model_parallel_size: PositiveInt = option(1, aliases=("--model-parallel-size",), axis="tp")
    """ranks that share each layer's weights"""
    pipeline_model_parallel_size: PositiveInt = option(1, axis="pp")
    """pipeline stages"""
    num_layers_per_virtual_pipeline_stage: PositiveInt | None = option(None)
    """layers per model chunk; each stage holds several chunks (interleaved schedule)"""
    num_virtual_stages_per_pipeline_rank: PositiveInt | None = option(
        None, needs=here.num_layers_per_virtual_pipeline_stage.is_none
    )
    """the same, given as the number of chunks per stage"""
    microbatch_group_size_per_virtual_pipeline_stage: PositiveInt | None = option(None)
    """micro-batches that pass through a chunk of the interleaved schedule before the next chunk's turn;
    default: as many as there are stages"""
    pipeline_schedule: Literal["auto", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"] = option(
        "auto", switches={"--enable-zbh1-pipeline": "zb-h1"}
    )
    """order of forward and backward passes; auto is 1f1b, or interleaved with virtual stages"""
    pipeline_partition: str = option("uniform")
    """how layers are split over the stages: uniform, parameters, cost, measured, type:REGEX, or the number of
    layers of each, such as 5,6,6,5"""
    context_parallel_size: PositiveInt = option(
        1,
        aliases=("--ds-sequence-parallel-size",),
        implies={"--ds-sequence-parallel-size": ("cp_comm_type", ("a2a",))},
        axis="cp",
    )
    """ranks that share each sequence"""
    cp_comm_type: CommTypes = option(("p2p",), synonyms={"allgather": "all_gather"})
    """what attention sends between the ranks that share a sequence: p2p keys and values to the ranks that see
    them, all_gather all keys and values to all, a2a heads for rows, a2a+p2p heads within blocks of ranks and
    keys and values between them; one for all layers, or one for each"""
    hierarchical_context_parallel_sizes: tuple[PositiveInt, PositiveInt] | None = option(None)
    """the ranks of a block that exchanges heads, and the number of blocks, for a2a+p2p"""
    expert_model_parallel_size: PositiveInt = option(
        1, aliases=("--moe-expert-parallel-size",), needs=config.model.num_experts, axis="ep"
    )
    """ranks that share the experts of a layer"""
    expert_tensor_parallel_size: PositiveInt | None = option(
        None, switches={"--enable-expert-tensor-parallelism": None}, axis="etp"
    )
    """ranks that share each expert's weights; for the experts a stage's ranks are expert-tensor x
    expert-model x replicas, for all else tensor x context x data; default: the tensor-parallel size"""
    moe_token_dispatcher_type: Literal["alltoall", "allgather"] = option(
        "alltoall",
        synonyms={"alltoall_seq": "alltoall"},
        refused={
            "flex": "calls kernels of other projects, which are not used here; alltoall moves the same rows"
        },
    )
    """how tokens get to the ranks that hold their experts: alltoall sends each row where it is needed;
    allgather sends all rows to all of them and adds up what comes back"""
    sequence_parallel: bool = option(False)
    """shard norm and dropout regions over the tensor-parallel ranks along the sequence"""
    distributed_backend: Literal["auto", "nccl", "gloo"] = option(
        "auto", needs=when("nccl", here.device.among("auto", "cuda"))
    )
    """communication library; auto is nccl on CUDA, else gloo"""
    check_collectives: bool = option(False)
    """verify before each collective that all its members make the same call; slow"""
    distributed_timeout_minutes: Patience = option(10.0, unit="minutes")
    """longest wait in one collective"""
    heartbeat_timeout_minutes: Patience | None = option(1.0, unit="minutes")
    """longest time without a sign of life from a rank, once all have made a step; null turns this off"""
    device: Literal["auto", "cpu", "cuda"] = option("auto")
    """where to train; auto is CUDA where present"""
