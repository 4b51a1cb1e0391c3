"""The section of the tree about how a step's work is prepared and launched, which changes only its speed."""

from __future__ import annotations

from typing import Literal

from megazero.config.option import Section, option


class AccelerationConfig(Section):
    """Compilation and CUDA graphs"""

    compile: bool = option(
        False,
        "compile each layer by torch.compile, which fuses what is between its matrix products; the first "
        "step takes as long as that needs",
    )
    cuda_graph: bool = option(
        False,
        "launch each layer's forward and backward as one CUDA graph each, from the fourth micro-batch on",
    )
    compile_backend: Literal["inductor", "aot_eager", "eager"] = option(
        "inductor",
        "what `--compile` makes of a layer: inductor generates kernels; aot_eager and eager only trace, to "
        "find faults",
    )
