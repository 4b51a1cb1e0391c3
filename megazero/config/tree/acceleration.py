"""The section of the tree about how a step's work is prepared and launched, which changes only its speed."""

from __future__ import annotations

from typing import Literal

from megazero.config.tree.option import Section, option


class AccelerationConfig(Section):
    """Compilation and CUDA graphs"""

    compile: bool = option(
        False,
        "compile each layer by torch.compile, which fuses what is between its matrix products; the first "
        "step takes as long as that needs",
        needs=(
            "model.num_experts=(): routers decide anew in each step how many rows an expert gets",
            "curriculum.seqlen_schedule=none: layers would be compiled anew for each length",
            "skipping.random_ltd=False: what a layer computes would change from step to step",
            "skipping.progressive_layer_drop=False: what a layer computes would change from step to step",
            (
                "parallel.pipeline_schedule=auto,gpipe,1f1b,interleaved: both halves of backward are compiled"
                " in one"
            ),
        ),
    )
    cuda_graph: bool = option(
        False,
        "launch each layer's forward and backward as one CUDA graph each, from the fourth micro-batch on",
        needs=(
            "parallel.device=auto,cuda",
            "compile=False: what is compiled is launched by code of its own",
            "model.num_experts=(): how many rows an expert gets is read by the host",
            "curriculum.seqlen_schedule=none: a graph has the shapes of its capture",
            "skipping.random_ltd=False: a graph computes what its capture did",
            "skipping.progressive_layer_drop=False: a graph computes what its capture did",
            "zero.stage=0,1,2: a graph reads weights where they were, and stage 3 gathers and frees them",
            "parallel.pipeline_model_parallel_size=1: a graph has memory for one micro-batch at a time",
            "parallel.tensor_model_parallel_size=1: layers then communicate, which is not captured",
            "parallel.context_parallel_size=1: layers then communicate, which is not captured",
            "recompute.granularity=none,selective: a graph keeps the memory of its layer anyway",
        ),
    )
    compile_backend: Literal["inductor", "aot_eager", "eager"] = option(
        "inductor",
        "what `--compile` makes of a layer: inductor generates kernels; aot_eager and eager only trace, to "
        "find faults",
        needs="compile",
    )
