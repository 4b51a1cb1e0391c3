"""`MoEMLP`: a mixture of experts that replaces a layer's MLP."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megazero.config.tree.recompute import RecomputeConfig
from megazero.layers.computed_again import computed_again
from megazero.layers.inputs import LayerInputs
from megazero.layers.linear import Multiply
from megazero.layers.mlp import MLP, MLPResult
from megazero.layers.placement import Placement
from megazero.layers.sums import Sums
from megazero.moe.capacity import capacity, factor_of, kept_choices
from megazero.moe.dispatch import Dispatch, ExpertPlacement, all_gather_dispatch, all_to_all_dispatch
from megazero.moe.experts import Experts
from megazero.moe.hashed import HashedRouter
from megazero.moe.losses import router_terms
from megazero.moe.router import Router, router_bias, router_weight
from megazero.moe.tokens import gather_shares, take_share
from megazero.mpu.group import Group
from megazero.mpu.param_spec import InitialValues, ParamSpec
from megazero.ops.grouped_linear import Groups
from megazero.ops.included import Included
from megazero.spec.experts import CapacitySpec, MoeSpec
from megazero.spec.parts import StreamSpec


class MoEMLP(nn.Module):
    """A mixture of experts: [s, b, h] -> ([s, b, h], None, its router's sums for the loss terms).

    A token's result is the weighted sum of its k experts' results. Shared experts (DeepSeekMoE, Dai et al.
    2024) are an MLP for all tokens whose output is added, times a sigmoid gate if there is one. A residual
    mixture (Rajbhandari et al. 2022) mixes the experts with a dense MLP by a learned softmax:
    out = w0 experts + w1 mlp.

    Args:
        recompute: what backward recomputes; its tiles apply to the shared or dense MLP, not to experts.
        ids: size of the vocabulary, for hashed routers.
    """

    def __init__(
        self,
        layer: int,
        spec: MoeSpec,
        placement: Placement,
        *,
        recompute: RecomputeConfig | None = None,
        ids: int = 0,
    ):
        super().__init__()
        recompute = recompute or RecomputeConfig()
        tiles, self.shared_again = recompute.mlp_tiles, recompute.again("shared_experts")
        self.layer, self.spec, self.placement, self.total = layer, spec, placement, spec.experts
        self.dispatch: Dispatch = (
            all_to_all_dispatch if placement.token_dispatcher == "alltoall" else all_gather_dispatch
        )
        stream, routing = spec.stream, spec.router
        weight = router_weight(layer, self.total, stream, placement)
        bias = router_bias(layer, self.total, placement) if routing.bias else None
        router = HashedRouter(layer, weight, routing, bias, ids) if routing.hashed else None
        self.router = router or Router(layer, weight, routing, bias)
        self.experts = Experts(layer, self.total, spec.expert, placement, again=recompute.again("moe_act"))
        self.shared: MLP | None = None
        self.shared_gate: TokenLinear | None = None
        self.dense: MLP | None = None
        self.coefficient: TokenLinear | None = None
        name = f"layers.{layer}.mlp"
        if spec.shared is not None:
            self.shared = MLP(f"{name}.shared", spec.shared, placement, tiles=tiles)
            if spec.shared_gate:
                self.shared_gate = TokenLinear(f"{name}.shared_gate", 1, stream, placement, bias=False)
        if spec.dense is not None:
            self.dense = MLP(f"{name}.dense", spec.dense, placement, tiles=tiles)
            self.coefficient = TokenLinear(f"{name}.coefficient", 2, stream, placement, bias=True)

    def forward(self, x: Tensor, inputs: LayerInputs) -> MLPResult:
        rows, tokens = take_share(x, inputs.rows)
        choice = self.router(rows, tokens, inputs)
        spec = self.spec
        kept = kept_choices(spec.router, self.layer, choice, tokens, inputs)
        sums = router_terms(spec.router, choice, tokens, kept, self.router.load, spec.routers)
        if tokens.real is not None:
            real = tokens.real.unsqueeze(1).expand_as(choice.experts)
            kept = real if kept is None else kept & real
        placement = self._expert_placement(x, inputs)
        outputs = self.dispatch(placement, rows, choice.weights, choice.experts, kept)
        out = self._with_dense(gather_shares(outputs, x.shape, inputs.rows.spread), x, inputs)
        return out, None, Sums(sums.terms, {self.router.tally: sums.tokens})

    def _expert_placement(self, x: Tensor, inputs: LayerInputs) -> ExpertPlacement:
        groups = self.placement.groups

        def apply(rows: Tensor, sizes: Groups) -> Tensor:
            outputs: Tensor = self.experts(rows, sizes, inputs.deferred)
            return outputs

        group, reads = groups["expert"], self.experts.reads_sizes
        padded = pads(self.spec.router.capacity, x.device, group, reads)
        room = self._room(x.shape[1], inputs) if padded else None
        return ExpertPlacement(self.total, apply, group, groups["etp"].size, room, reads)

    def _room(self, b: int, inputs: LayerInputs) -> int | None:
        """The rows that each expert is padded to: its capacity for `b` sequences of full length; or None.

        Full length, because it must be the same on all ranks, which may trim their sequences differently.
        """
        spec = self.spec.router
        together, factor = spec.capacity.together, factor_of(spec.capacity, inputs)
        if factor is None:
            return None
        room = capacity(spec, self.spec.length * (b if together else 1), self.total, factor)
        return room if together else b * room

    def _with_dense(self, out: Tensor, x: Tensor, inputs: LayerInputs) -> Tensor:
        """Combine the experts' output [s, b, h] with that of the shared or dense MLP."""
        if self.shared is not None:
            shared = _biased(computed_again(self.shared_again, self.shared, x, inputs))
            if self.shared_gate is not None:
                shared = shared * self.shared_gate(x).sigmoid().to(shared.dtype)
            return out + shared
        if self.dense is not None and self.coefficient is not None:
            weights: Tensor = self.coefficient(x).softmax(-1).to(out.dtype)
            return out * weights[..., :1] + _biased(self.dense(x, inputs)) * weights[..., 1:]
        return out


def pads(spec: CapacitySpec, device: torch.device, group: Group, reads: bool) -> bool:
    """Whether to pad experts with blank rows to their capacity.

    By the setting, or on a single GPU whose products would otherwise wait for the sizes on the host. With
    several ranks padding would enlarge the messages.
    """
    return spec.padded or (reads and device.type == "cuda" and group.size == 1)


def _biased(result: MLPResult) -> Tensor:
    out, bias, _ = result
    assert not isinstance(bias, Included), "only an attention or MLP branch returns an included bias"
    return out if bias is None else out + bias


class TokenLinear(nn.Module):
    """A linear map of each token in fp32: x [s, b, h] -> float32 [s, b, n], replicated over tensor ranks."""

    def __init__(self, name: str, width: int, stream: StreamSpec, placement: Placement, *, bias: bool):
        super().__init__()
        partial = placement.sequence_parallel
        normal, zeros = InitialValues("normal", stream.std), InitialValues("zeros")
        shape = (width, stream.width)
        self.weight = placement.parameter(ParamSpec(f"{name}.weight", shape, normal, partial_grad=partial))
        self.bias = None
        if bias:
            spec = ParamSpec(f"{name}.bias", (width,), zeros, weight_decay=False, partial_grad=partial)
            self.bias = placement.parameter(spec)
        self.multiply: Multiply = F.linear

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.float()
        return self.multiply(x.float(), self.weight.float(), bias)
