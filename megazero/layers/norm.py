"""Layer norm and RMSNorm as modules."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

from megazero.layers.placement import Placement
from megazero.mpu.param_spec import InitialValues, ParamSpec
from megazero.ops.layer_norm import add_layer_norm, layer_norm
from megazero.ops.rms_norm import add_rms_norm, rms_norm


class Norm(nn.Module):
    """[..., h] -> [..., h]. `kind` is ``LayerNorm`` (weight and bias) or ``RMSNorm`` (weight only)."""

    def __init__(self, name: str, features: int, kind: str, eps: float, placement: Placement):
        super().__init__()
        self.eps = eps

        def vector(suffix: str, init: Literal["zeros", "ones"]) -> nn.Parameter:
            spec = ParamSpec(
                f"{name}.{suffix}",
                (features,),
                InitialValues(init),
                weight_decay=False,
                partial_grad=placement.sequence_parallel,
            )
            return placement.parameter(spec)

        self.weight = vector("weight", "ones")
        self.bias = vector("bias", "zeros") if kind == "LayerNorm" else None

    def forward(
        self, x: Tensor, residual: Tensor | None = None, *, both: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The norm of x; or, with a residual, the norm of x + residual, and that sum.

        With `both` and no residual the pair is the norm of x and x, for what comes after to use.
        """
        if both or residual is not None:
            if self.bias is None:
                return add_rms_norm(x, residual, self.weight, self.eps)
            return add_layer_norm(x, residual, self.weight, self.bias, self.eps)
        if self.bias is None:
            return rms_norm(x, self.weight, self.eps)
        return layer_norm(x, self.weight, self.bias, self.eps)
