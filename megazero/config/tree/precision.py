"""The section `precision`: types, loss scales and 8-bit products."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from megazero.config.condition import config, here
from megazero.config.tree.option import Scale, Section, option


class PrecisionConfig(Section):
    """Precision"""

    dtype: Literal["fp32", "fp16", "bf16"] = option(
        "fp32", flag="--params-dtype", switches={"--fp16": "fp16", "--bf16": "bf16"}
    )
    """type of parameters and activations; moments are always fp32, and so are master weights and gradient
    sums unless the section `zero` says otherwise"""
    tf32: bool = option(False, needs=config.parallel.device.among("auto", "cuda"))
    """round the factors of fp32 products to TF32 on CUDA, with 10 bits of mantissa: several times faster"""
    loss_scale: Scale = option(None, needs=here.dtype.among("fp16", "bf16"))
    """static loss scale of fp16 and bf16; default, and with 0: dynamic for fp16, none for bf16"""
    initial_loss_scale: PositiveFloat = option(2.0**32)
    """first dynamic loss scale"""
    min_loss_scale: PositiveFloat = option(1.0)
    """floor of the dynamic loss scale"""
    loss_scale_window: PositiveInt = option(1000, unit="iterations")
    """good steps before the scale doubles"""
    hysteresis: PositiveInt = option(2)
    """overflows tolerated before the scale halves"""
    fp8_format: Literal["none", "e4m3", "hybrid"] = option(
        "none",
        switches={"--fp8": "hybrid", "--fp8-hybrid": "hybrid", "--fp8-e4m3": "e4m3"},
        needs=(
            (config.model.num_experts == ()).because("the products of experts are not of 8-bit floats"),
            config.parallel.pipeline_schedule.among("auto", "gpipe", "1f1b", "interleaved").because(
                "both halves of backward are one product"
            ),
        ),
    )
    """multiply 8-bit floats in the linear layers: e4m3 in all products; hybrid has gradients in e5m2, which
    has more range and fewer digits"""
    fp8_recipe: Literal["delayed", "tensorwise"] = option(
        "delayed",
        refused={
            "mxfp8": "needs scales of blocks of 32 elements, which are not built; choose tensorwise",
            "blockwise": "needs scales of blocks, which are not built; choose tensorwise",
            "custom": "takes code of another project; choose tensorwise or delayed",
        },
        needs=here.fp8_format,
    )
    """where the scales of 8-bit tensors come from: the amaxes of earlier steps, or the tensor itself"""
    fp8_margin: NonNegativeInt = option(0, needs=here.fp8_format)
    """powers of two that the scales of 8-bit tensors stay below the largest ones"""
    fp8_amax_history_len: PositiveInt = option(
        1, unit="iterations", needs=(here.fp8_format, here.fp8_recipe == "delayed")
    )
    """delayed: steps whose amaxes are kept"""
    fp8_amax_compute_algo: Literal["most_recent", "max"] = option(
        "most_recent", needs=(here.fp8_format, here.fp8_recipe == "delayed")
    )
    """delayed: which of the kept amaxes makes the scale"""
    first_last_layers_bf16: bool = option(False, needs=here.fp8_format)
    """8-bit products: leave the first and the last layers of the model out"""
    num_layers_at_start_in_bf16: NonNegativeInt = option(1, needs=here.first_last_layers_bf16)
    """how many first layers `--first-last-layers-bf16` leaves out"""
    num_layers_at_end_in_bf16: NonNegativeInt = option(1, needs=here.first_last_layers_bf16)
    """how many last layers `--first-last-layers-bf16` leaves out"""

    def layers_in_16_bits(self, layers: int) -> frozenset[int]:
        """The layers, in a model of `layers` layers, whose products are in 16 bits; all without fp8."""
        if self.fp8_format == "none":
            return frozenset(range(layers))
        if not self.first_last_layers_bf16:
            return frozenset()
        first, last = self.num_layers_at_start_in_bf16, self.num_layers_at_end_in_bf16
        return frozenset(i for i in range(layers) if i < first or i >= layers - last)
