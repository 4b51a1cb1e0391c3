"""The section `acceleration`: how a step's work is compiled and launched, which changes only its speed."""

from __future__ import annotations

from typing import Literal

from megazero.config.condition import config, here
from megazero.config.tree.option import Section, option


class AccelerationConfig(Section):
    """Compilation and CUDA graphs"""

    compile: bool = option(
        False,
        needs=(
            (config.model.num_experts == ()).because(
                "routers decide anew in each step how many rows an expert gets"
            ),
            (config.curriculum.seqlen_schedule == "none").because(
                "layers would be compiled anew for each length"
            ),
            config.skipping.random_ltd.is_off.because("what a layer computes would change from step to step"),
            config.skipping.progressive_layer_drop.is_off.because(
                "what a layer computes would change from step to step"
            ),
            config.parallel.pipeline_schedule.among("auto", "gpipe", "1f1b", "interleaved").because(
                "both halves of backward are compiled in one"
            ),
        ),
    )
    """compile each layer by torch.compile, which fuses what is between its matrix products; the first step
    takes as long as that needs"""
    cuda_graph: bool = option(
        False,
        needs=(
            config.parallel.device.among("auto", "cuda"),
            here.compile.is_off.because("what is compiled is launched by code of its own"),
            (config.model.num_experts == ()).because("how many rows an expert gets is read by the host"),
            (config.curriculum.seqlen_schedule == "none").because("a graph has the shapes of its capture"),
            config.skipping.random_ltd.is_off.because("a graph computes what its capture did"),
            config.skipping.progressive_layer_drop.is_off.because("a graph computes what its capture did"),
            config.zero.stage.among(0, 1, 2).because(
                "a graph reads weights where they were, and stage 3 gathers and frees them"
            ),
            (config.parallel.pipeline_model_parallel_size == 1).because(
                "a graph has memory for one micro-batch at a time"
            ),
            (config.parallel.tensor_model_parallel_size == 1).because(
                "layers then communicate, which is not captured"
            ),
            (config.parallel.context_parallel_size == 1).because(
                "layers then communicate, which is not captured"
            ),
            config.recompute.granularity.among("none", "selective").because(
                "a graph keeps the memory of its layer anyway"
            ),
        ),
    )
    """launch each layer's forward and backward as one CUDA graph each, from the fourth micro-batch on"""
    compile_backend: Literal["inductor", "aot_eager", "eager"] = option("inductor", needs=here.compile)
    """what `--compile` makes of a layer: inductor generates kernels; aot_eager and eager only trace, to find
    faults"""
