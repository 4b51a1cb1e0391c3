"""Layer norm and RMSNorm as modules."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megazero.layers.collectives import reduce_from_slices, share_for_parts
from megazero.layers.placement import Placement
from megazero.mpu.group import Group
from megazero.mpu.param_spec import Cut, InitialValues, ParamSpec
from megazero.ops.chunks import compute_dtype
from megazero.ops.layer_norm import add_layer_norm, layer_norm
from megazero.ops.rms_norm import add_rms_norm, rms_norm
from megazero.spec.parts import NormSpec


class Norm(nn.Module):
    """[..., h] -> [..., h], by layer norm (weight, and bias unless they are left out) or RMSNorm (weight).

    Args:
        name: global name.
        spec: its kind, and h.
        placement: ranks, dtype and device.
    """

    def __init__(self, name: str, spec: NormSpec, placement: Placement):
        super().__init__()
        self.eps, self.centred, self.scope = spec.eps, spec.centred, spec.scope
        scope = spec.scope
        self.slices: Group | None = placement.tp if scope == "projection" and placement.tp.size > 1 else None
        cuts = (Cut(0, "tp"),) if scope == "projection" else ()
        partial = placement.tp.size > 1 if scope == "head" else placement.sequence_parallel and not cuts

        def vector(suffix: str, init: InitialValues) -> nn.Parameter:
            place = ParamSpec(
                f"{name}.{suffix}", (spec.features,), init, cuts, spec.decays, partial_grad=partial
            )
            return placement.parameter(place)

        zeros = InitialValues("zeros")
        self.weight = vector("weight", zeros if self.centred else InitialValues("ones"))
        self.by_mean = spec.by_mean
        self.bias = vector("bias", zeros) if spec.bias else None

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None = None,
        *,
        both: bool = False,
        included: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The norm of x; or, with a residual, the norm of x + residual, and that sum.

        With `both` and no residual, the pair is the norm of x, and x itself for later use. For pairs,
        `included` is a bias that x already contains; backward computes its gradient too.
        """
        weight: Tensor = self.weight
        bias: Tensor | None = self.bias
        if self.centred:
            weight = weight.to(compute_dtype(weight.dtype)) + 1
            bias = None if bias is None else bias.to(weight.dtype)  # kernels take both alike
        if self.slices is not None:
            return self._over(self.slices, x, weight)
        if self.by_mean and bias is None:
            bias = torch.zeros_like(weight)
        if both or residual is not None:
            if bias is None:
                return add_rms_norm(x, residual, weight, self.eps, included)
            return add_layer_norm(x, residual, weight, bias, self.eps, included)
        return rms_norm(x, weight, self.eps) if bias is None else layer_norm(x, weight, bias, self.eps)

    def of_heads(self, x: Tensor) -> Tensor:
        """The norm of x [s, b, n, d], over each head or over all heads together, as the scope says."""
        together = self.scope == "projection"
        normed = self(x.flatten(2) if together else x)
        result: Tensor = normed.view(x.shape) if together else normed
        return result

    def _over(self, slices: Group, x: Tensor, weight: Tensor) -> Tensor:
        """The norm of x [..., h/tp] over all channels, of which the other ranks hold the rest."""

        def mean(y: Tensor) -> Tensor:
            total = reduce_from_slices(y.mean(-1, keepdim=True) / slices.size, slices)
            return share_for_parts(total, slices)

        wide = x.to(compute_dtype(x.dtype))
        if self.by_mean:
            wide = wide - mean(wide)
        y = wide * (mean(wide.square()) + self.eps).rsqrt() * weight
        return (y if self.bias is None else y + self.bias).to(x.dtype)
