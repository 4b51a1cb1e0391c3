"""`Router`: chooses the experts of each token, and their weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megazero.layers.inputs import LayerInputs
from megazero.layers.linear import Multiply
from megazero.layers.placement import Placement
from megazero.moe.sinkhorn import assignment
from megazero.moe.tokens import Tokens
from megazero.mpu.param_spec import InitialValues, ParamSpec
from megazero.mpu.rng import site_key
from megazero.ops.counter_random import derive, hash_uniform
from megazero.ops.gate import Gating, gate
from megazero.ops.top_k import top_k
from megazero.spec.experts import RouterSpec
from megazero.spec.parts import StreamSpec


@dataclass(frozen=True)
class Routing:
    """The decision of a router for n tokens.

    Attributes:
        experts: int64 [n, k], the chosen experts, best first; of equal ones the lower number comes first.
        weights: float32 [n, k], the factor of each chosen expert's result.
        probabilities: float32 [n, E], the scores of all experts, normalized to sum to 1.
        logits: float32 [n, E].
    """

    experts: Tensor
    weights: Tensor
    probabilities: Tensor
    logits: Tensor


def router_name(layer: int) -> str:
    """The global name of a layer's router."""
    return f"layers.{layer}.mlp.router"


def router_weight(layer: int, experts: int, stream: StreamSpec, placement: Placement) -> nn.Parameter:
    """The weight [E, h] of a layer's router."""
    return placement.parameter(
        ParamSpec(
            f"{router_name(layer)}.weight",
            (experts, stream.width),
            InitialValues("normal", stream.std),
            # Each tensor-parallel rank routes its own tokens.
            partial_grad=placement.tp.size > 1,
        )
    )


def router_bias(layer: int, experts: int, placement: Placement) -> nn.Parameter:
    """The bias [E] of the logits of a layer's router."""
    name, zeros, partial = f"{router_name(layer)}.logit_bias", InitialValues("zeros"), placement.tp.size > 1
    return placement.parameter(ParamSpec(name, (experts,), zeros, weight_decay=False, partial_grad=partial))


class Router(nn.Module):
    """Scores E experts for each token and chooses k.

    The logits are a product in fp32. With softmax scores, the weights are the softmax over the chosen logits,
    or with `moe_router_pre_softmax` the softmax over all logits. With sigmoid scores, the weights are the
    chosen scores, for k > 1 divided by their sum (DeepSeek-V3, arXiv:2412.19437). An expert bias affects the
    choice alone; `RouterLoads` updates it to balance loads (Wang et al. 2024, arXiv:2408.15664). With groups,
    only experts of the groups whose best experts score highest are chosen. With `sinkhorn`, training chooses
    by a balanced `assignment`; the weights are the sigmoid of the logits for k = 1, else their softmax over
    all experts. With `moe_router_force_load_balancing`, training replaces the logits by normal random numbers
    that pass the gradient on to the logits (Megatron-LM's, for benchmarks).

    Args:
        weight: [E, h].
        logit_bias: [E], added to the logits; or None.
    """

    def __init__(
        self, layer: int, weight: nn.Parameter, spec: RouterSpec, logit_bias: nn.Parameter | None = None
    ):
        super().__init__()
        self.layer = layer
        self.experts = len(weight)
        self.spec = spec
        self.gating = _gating(spec)
        self.name = router_name(layer)
        self.weight = weight
        self.logit_bias = logit_bias
        self.multiply: Multiply = F.linear
        # Both float32 [E], the same on every rank; `RouterLoads` sets them.
        self.bias: Tensor | None = None  # added to the scores for the choice
        self.load: Tensor | None = None  # each expert's fraction of the choices of the last step

    @property
    def tally(self) -> str:
        """Name of the tally that counts how often each expert was chosen."""
        return f"{self.name}.tokens"

    def forward(self, x: Tensor, tokens: Tokens, inputs: LayerInputs) -> Routing:
        """Choose experts for x [n, h]."""
        spec, noise = self.spec, Noise(self.layer, tokens, inputs)
        x, weight = x.float(), self.weight.float()
        if spec.jitter and noise.on:
            x = x * (1 + spec.jitter * (2 * noise.uniform("jitter", x.shape[1]) - 1))
        logits = self.multiply(x, weight, None if self.logit_bias is None else self.logit_bias.float())
        if spec.forced and noise.on:
            logits = noise.normal(self.experts) + (logits - logits.detach())
        with torch.no_grad():
            ranking = logits.sigmoid() if spec.sigmoid else logits
            if spec.assigns and noise.on:
                ranking = assignment(logits, tokens)
            chosen = self._choose(ranking, noise)
        weights, probabilities = gate(logits, chosen, self.gating)
        if spec.scaling is not None:
            weights = weights * spec.scaling
        return Routing(chosen, weights, probabilities, logits)

    def _choose(self, ranking: Tensor, noise: Noise) -> Tensor:
        """The experts that rank highest in `ranking` [n, E]: int64 [n, k]."""
        spec = self.spec
        if self.bias is not None:
            ranking = ranking + self.bias
        if spec.groups is not None:
            ranking = self._within_groups(ranking)
        k, sampling = spec.topk, spec.sampling if noise.on else "none"
        if sampling == "first":
            ranking = ranking + noise.gumbel(self.experts)
        best = top_k(ranking, k)
        if sampling == "second":
            others = ranking + noise.gumbel(self.experts)
            others = others.scatter(1, best[:, :1], -torch.inf)
            best = torch.cat([best[:, :1], top_k(others, 1)], 1)
        return best

    def _within_groups(self, ranking: Tensor) -> Tensor:
        """Set `ranking` to -inf outside of the best groups, by the sum of each group's best experts."""
        groups, kept = self.spec.groups, self.spec.group_topk
        assert groups is not None
        assert kept is not None, "a rule has them set together"
        grouped = ranking.view(len(ranking), groups, -1)
        best = grouped.sort(dim=2, descending=True).values[..., : self.spec.topk // kept].sum(2)
        inside = torch.zeros_like(best, dtype=torch.bool).scatter(1, top_k(best, kept), True)
        return grouped.masked_fill(~inside.unsqueeze(2), -torch.inf).view_as(ranking)


class Noise:
    """Random numbers of a router: functions of (seed, layer, sample, position, column) alone."""

    def __init__(self, layer: int, tokens: Tokens, inputs: LayerInputs):
        self.layer, self.tokens, self.rows, self.keys = layer, tokens, inputs.rows, inputs.rows.keys
        self.on = inputs.rows.keys is not None

    def uniform(self, site: str, columns: int) -> Tensor:
        """Uniform numbers in [0, 1), multiples of 2^-24, float32 [n, columns]."""
        assert self.keys is not None, "noise needs random keys"
        rows = row_keys(self.keys, self.tokens, "router", self.layer, site)
        return hash_uniform(rows.unsqueeze(1), torch.arange(columns, device=rows.device))

    def gumbel(self, columns: int) -> Tensor:
        """Numbers from the standard Gumbel distribution, float32 [n, columns]."""
        return -(-self._open("sample", columns).log()).log()

    def normal(self, columns: int) -> Tensor:
        """Numbers from the standard normal distribution, float32 [n, columns]."""
        return 2**0.5 * torch.erfinv(2 * self._open("forced", columns) - 1)

    def _open(self, site: str, columns: int) -> Tensor:
        """Uniform numbers in the open interval (0, 1), float32 [n, columns]."""
        # The middle of each step of 2^-24, so never 0; the last middle would be rounded to 1.
        return (self.uniform(site, columns) + 2.0**-25).clamp_max(1 - 2.0**-24)


def row_keys(sample_keys: Tensor, tokens: Tokens, *site: str | int) -> Tensor:
    """The random key of each token at a site of the model: int64 [n]."""
    return derive(derive(site_key(*site), sample_keys)[tokens.sequence], tokens.position)


def _gating(spec: RouterSpec) -> Gating:
    if spec.assigns:
        return Gating.SIGMOID if spec.topk == 1 else Gating.SOFTMAX_BEFORE
    if spec.sigmoid:
        return Gating.SIGMOID
    return Gating.SOFTMAX_BEFORE if spec.pre_softmax else Gating.SOFTMAX_AFTER
