"""The parts of a layer with experts: its router, their capacity, and the experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megazero.spec.parts import MlpSpec, StreamSpec


@dataclass(frozen=True)
class CapacitySpec:
    """The most tokens that an expert takes, as multiples of an even share.

    Attributes:
        factor: the multiple in training; None if no token is dropped.
        eval_factor: the multiple in evaluations; None for that of training.
        least: the least capacity of an expert, in tokens.
        policy: which tokens an expert keeps.
        together: whether capacity is counted over all sequences of a micro-batch; else within each sequence.
        padded: whether every expert gets exactly as many rows as its capacity.
    """

    factor: float | None = None
    eval_factor: float | None = None
    least: int = 0
    policy: Literal["probs", "position", "random"] = "probs"
    together: bool = False
    padded: bool = False

    @property
    def drops(self) -> bool:
        """Whether experts have a capacity, in training or in evaluation."""
        return self.factor is not None or self.eval_factor is not None


@dataclass(frozen=True)
class RouterSpec:
    """The choice of a token's experts.

    Attributes:
        topk: experts of each token.
        sigmoid: whether scores are sigmoids of the logits; else they are a softmax.
        pre_softmax: whether the softmax is over all experts before the choice.
        bias: whether logits have a learned bias.
        groups, group_topk: the number of groups of neighbouring experts, and of those that a token chooses.
        scaling: multiplies the weights of the chosen experts; None for 1.
        expert_bias: whether each expert has a bias in the choice, which moves towards equal loads.
        bias_rate: the change of that bias in a step.
        balance: (kind, weight) of each load-balancing loss in use.
        assigns: whether training chooses experts by an even assignment (sinkhorn).
        z_loss: weight of the z-loss.
        jitter: training multiplies the router's input by noise from 1 - jitter to 1 + jitter.
        sampling: the choice, of the first or the second expert, to which Gumbel noise is added.
        forced: whether training puts random numbers in the place of the logits, for benchmarks.
        hashed: whether a fixed table names the experts by the tokens' ids.
        capacity: the most tokens that an expert takes.
    """

    topk: int = 2
    sigmoid: bool = False
    pre_softmax: bool = False
    bias: bool = False
    groups: int | None = None
    group_topk: int | None = None
    scaling: float | None = None
    expert_bias: bool = False
    bias_rate: float = 1e-3
    balance: tuple[tuple[str, float], ...] = ()
    assigns: bool = False
    z_loss: float = 0.0
    jitter: float = 0.0
    sampling: Literal["none", "first", "second"] = "none"
    forced: bool = False
    hashed: bool = False
    capacity: CapacitySpec = CapacitySpec()


@dataclass(frozen=True)
class MoeSpec:
    """Experts in the place of an MLP.

    Attributes:
        experts: the number of experts.
        expert: the MLP of each expert.
        router: how tokens are sent to experts.
        routers: the number of layers of the model with a router.
        length: tokens of a sequence in training.
        shared: the shared experts, an MLP that all tokens go through; None without them.
        shared_gate: whether the shared experts are weighed by a sigmoid gate of each token.
        dense: the MLP that is mixed with the experts (residual experts); None without it.
    """

    stream: StreamSpec
    experts: int
    expert: MlpSpec
    router: RouterSpec
    routers: int
    length: int
    shared: MlpSpec | None = None
    shared_gate: bool = False
    dense: MlpSpec | None = None
