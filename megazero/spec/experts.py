"""The parts of a layer with experts: its router, their capacity, and the experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megazero.spec.parts import MlpSpec, StreamSpec


@dataclass(frozen=True)
class CapacitySpec:
    """The most tokens that an expert takes, as multiples of an even share.

    Attributes:
        factor: the multiple; None if no token is dropped.
        eval_factor: that of evaluations; None for the same.
        least: tokens that an expert takes at least.
        policy: which tokens an expert keeps.
        together: whether capacity is counted over the sequences of a micro-batch; else within each.
        padded: whether every expert gets as many rows as its capacity.
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
        groups, group_topk: groups of neighbouring experts, and how many of them a token chooses first.
        scaling: multiplies the weights of the chosen experts; None for 1.
        expert_bias: whether a bias of each expert, which follows the loads, takes part in the choice.
        bias_rate: how far it moves in a step.
        balance: kinds of load-balancing losses that are in use, and their weights.
        assigns: whether training chooses by an even assignment (sinkhorn).
        z_loss: weight of the z-loss.
        jitter: training multiplies the input by noise in 1 - jitter to 1 + jitter.
        sampling: the choice that Gumbel noise is added for.
        forced: whether training takes random numbers for logits.
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
        experts: how many there are.
        expert: each of them.
        router: how tokens get to them.
        routers: layers of the model that have one.
        length: tokens of a sequence in training.
        shared: the MLP beside them that all tokens go through; None for none.
        shared_gate: whether it is weighed by a sigmoid gate of each token.
        dense: the MLP that is mixed with them; None for none.
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
