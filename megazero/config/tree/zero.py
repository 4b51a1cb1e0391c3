"""The section `zero`: what ZeRO shards, and how ranks exchange it."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeInt, PositiveInt

from megazero.config.condition import config, here, when
from megazero.config.tree.option import Section, option

_SCALED = when("fp16", config.precision.dtype == "fp16").because("its loss scale keeps gradients in range")


class ZeroConfig(Section):
    """ZeRO data parallelism"""

    stage: Literal[0, 1, 2, 3] = option(
        0,
        flag="--zero-stage",
        switches={"--use-distributed-optimizer": 1, "--use-torch-fsdp2": 3},
        yielding=("--use-distributed-optimizer",),
    )
    """what is sharded over the data-parallel ranks: 0 nothing, 1 the optimizer state, 2 also the gradients, 3
    also the parameters"""
    bucket_size: PositiveInt = option(
        16_000_000, aliases=("--zero-reduce-bucket-size", "--ddp-bucket-size"), unit="elements"
    )
    """parameters per bucket; a bucket is reduced or gathered by one call"""
    overlap_grad_reduce: bool = option(True, switches={"--overlap-grad-reduce": True})
    """reduce gradients after backward instead of while it runs"""
    overlap_param_gather: bool = option(True, switches={"--overlap-param-gather": True})
    """gather the parameters of stage 3 when they are used instead of ahead, and wait for those that stages 1
    and 2 have updated before the step ends instead of where the next forward uses them"""
    prefetch_size: NonNegativeInt = option(50_000_000, flag="--zero-prefetch-bucket-size", unit="elements")
    """stage 3: parameters gathered ahead of their use"""
    param_persistence_threshold: NonNegativeInt = option(
        100_000, flag="--zero-param-persistence-threshold", unit="elements"
    )
    """stage 3: parameters below this size stay whole on every rank"""
    max_live_parameters: NonNegativeInt = option(
        1_000_000_000, flag="--zero-max-live-parameters", unit="elements"
    )
    """stage 3: keep gathered parameters for their next use in the step, up to this many; 0 frees each after
    its use"""
    hpz_partition_size: PositiveInt = option(1, flag="--zero-hpz-partition-size", needs=here.stage == 3)
    """stage 3: data x context ranks of one node, which hold a second partition of the parameters, so that
    backward gathers within the node (ZeRO++); 1 is off"""
    quantized_weights: Literal["none", "int8", "int4", "fp8"] = option(
        "none", flag="--zero-quantized-weights", needs=here.stage.among(1, 2, 3)
    )
    """codes in which weights of two or more dims are gathered (qwZ of ZeRO++); masters stay exact"""
    quantized_gradients: Literal["none", "int8", "int4", "fp8"] = option(
        "none", flag="--zero-quantized-gradients", needs=here.stage.among(1, 2, 3)
    )
    """codes in which gradients of such weights are sent, to be summed in fp32 (qgZ of ZeRO++)"""
    quantization_block_size: PositiveInt = option(
        256,
        flag="--zero-quantization-block-size",
        unit="elements",
        needs=here.quantized_weights | here.quantized_gradients,
    )
    """consecutive elements that share a scale where weights or gradients travel as codes"""
    quantization_rounding: Literal["nearest", "stochastic"] = option(
        "nearest", flag="--zero-quantization-rounding", needs=here.quantized_gradients
    )
    """how gradients are rounded to codes; stochastic has no bias, and twice the bound on the error"""
    node_size: PositiveInt = option(1, flag="--zero-node-size", needs=here.quantized_gradients)
    """data x context ranks of one node: quantized gradients are first summed within it; 1 sums them in one
    exchange, unless `--zero-hpz-partition-size` says how many there are"""
    grad_reduce_dtype: Literal["fp32", "bf16", "fp16"] = option(
        "fp32", switches={"--grad-reduce-in-bf16": "bf16"}, needs=_SCALED
    )
    """type of gradients on the wire between data-parallel ranks"""
    grad_accumulation_dtype: Literal["fp32", "bf16", "fp16"] = option(
        "fp32",
        aliases=("--main-grads-dtype",),
        switches={"--accumulate-allreduce-grads-in-fp32": "fp32"},
        needs=_SCALED,
    )
    """type of gradient sums over the micro-batches"""
    main_params_dtype: Literal["fp32", "bf16", "fp16"] = option(
        "fp32",
        needs=(
            when("bf16", config.precision.dtype == "bf16"),
            when("fp16", config.precision.dtype == "fp16"),
        ),
    )
    """type of the optimizer's own copy of the weights"""
