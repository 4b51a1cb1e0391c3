"""`Mamba2`: the mixer of a state-space layer (Dao & Gu 2024), with its groups sliced over tensor ranks."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from megazero.layers.computed_again import computed_again
from megazero.layers.inputs import LayerInputs
from megazero.layers.linear import ColumnParallelLinear, RowParallelLinear
from megazero.layers.placement import Placement
from megazero.layers.state_space.convolution import WIDTH, causal_convolution
from megazero.layers.state_space.initial import LOG_RATES, STEPS, TAPS
from megazero.layers.state_space.library import cuda_scan
from megazero.layers.state_space.scan import selective_scan
from megazero.mpu.param_spec import Cut, InitialValues, ParamSpec
from megazero.ops.chunks import compute_dtype
from megazero.spec.parts import MixerSpec

_ONES = InitialValues("ones")


class Mamba2(nn.Module):
    """[s, b, h] -> ([s, b, h], no bias); both hold s/tp rows under sequence parallelism.

    If the inputs say which rows are wanted, the result is [r, b, h] and holds only these.

    Heads of p channels come in g groups of r. One weight of logical shape [g, 2 r p + 2 n + r, h] computes
    for each group: the gates and inputs of its heads (2 r p), the vectors B and C (2 n), and the step lengths
    (r). Slicing over groups keeps each group whole, with its part of the convolution and of the norm.

    Args:
        recompute: whether to drop the activations between the projections and compute them again in backward.
    """

    def __init__(self, layer: int, spec: MixerSpec, placement: Placement, *, recompute: bool = False):
        super().__init__()
        self.layer, self.recompute, self.eps, self.min_step = layer, recompute, spec.eps, spec.min_step
        self.cuda_scan = cuda_scan()
        name, groups, n = f"layers.{layer}.mamba", spec.groups, spec.state
        heads = spec.heads // groups
        width = heads * spec.head_dim
        self.head_dim, self.parts = spec.head_dim, (width, width + 2 * n, heads)
        self.mixed = (width, n, n)
        self.input = ColumnParallelLinear(
            f"{name}.input",
            spec.stream.width,
            (groups, sum(self.parts)),
            placement,
            bias=False,
            std=spec.stream.std,
            matrices=None,  # of unlike kinds, which Megatron-LM keeps from Muon too
        )

        def parameter(what: str, init: InitialValues, *shape: int) -> nn.Parameter:
            decays = what == "conv.weight"
            cuts = (Cut(0, "tp"),)
            return placement.parameter(
                ParamSpec(f"{name}.{what}", (groups, *shape), init, cuts, weight_decay=decays)
            )

        self.conv_weight = parameter("conv.weight", TAPS, width + 2 * n, WIDTH)
        self.conv_bias = parameter("conv.bias", TAPS, width + 2 * n)
        self.dt_bias = parameter("dt_bias", STEPS, heads)
        self.a_log = parameter("a_log", LOG_RATES, heads)
        self.skip = parameter("skip", _ONES, heads)
        self.norm_weight = parameter("norm.weight", _ONES, width)
        self.output = RowParallelLinear(
            f"{name}.output",
            spec.width,
            spec.stream.width,
            placement,
            bias=False,
            std=spec.stream.out_std,
        )

    def forward(self, x: Tensor, inputs: LayerInputs) -> tuple[Tensor, Tensor | None]:
        made = self.input(x, inputs.deferred)
        made = made.unflatten(-1, self.input.local_shape)  # [s, b, g/tp, 2 r p + 2 n + r]
        mixed = computed_again(self.recompute, self._mix, made, inputs)
        result: tuple[Tensor, Tensor | None] = self.output(mixed, inputs.deferred)
        return result

    def _mix(self, made: Tensor, inputs: LayerInputs) -> Tensor:
        """From the projection to the context of the wanted rows, [s or r, b, g r p / tp]."""
        documents = inputs.rows.documents
        segments = None if documents is None else documents.run_numbers
        # In training there is none: what asks for the layer's number makes a graph of its own for each.
        memory = None if inputs.core is None else inputs.core.mixer_states
        before, state = (None, None) if memory is None else memory.get(self.layer, (None, None))
        gate, mixed, dt = made.split(self.parts, -1)
        wide = compute_dtype(made.dtype)
        taps, bias = self.conv_weight.to(wide), self.conv_bias.to(wide)
        mixed, before = causal_convolution(mixed.to(wide), taps, bias, before, segments)
        x, b, c = F.silu(mixed).split(self.mixed, -1)
        x = x.unflatten(-1, (-1, self.head_dim))
        dt = F.softplus(dt.to(wide) + self.dt_bias.to(wide))
        if self.min_step:
            dt = dt.clamp(min=self.min_step)
        scan = self.cuda_scan if x.is_cuda else selective_scan
        y, state = scan(x, dt, -self.a_log.to(wide).exp(), b, c, state, segments)
        if memory is not None:
            memory[self.layer] = before, state
        y = (y + self.skip.to(wide).unsqueeze(-1) * x).flatten(-2)
        gated = inputs.narrow(y * F.silu(gate.to(wide)))
        normed = F.rms_norm(gated, gated.shape[-1:], eps=self.eps) * self.norm_weight
        return normed.flatten(2).to(made.dtype)
