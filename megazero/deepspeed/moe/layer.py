"""`MoE`: DeepSpeed's mixture-of-experts layer, for models of any kind under `megazero.initialize`."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Literal, cast

import torch
from torch import Tensor, nn

from megazero.deepspeed.moe.copies import ExpertCopies, plain_output
from megazero.errors import ConfigError
from megazero.layers.inputs import LayerInputs
from megazero.layers.rows import Rows
from megazero.moe.capacity import kept_choices
from megazero.moe.dispatch import ExpertPlacement, all_to_all_dispatch
from megazero.moe.losses import switch_loss
from megazero.moe.router import Router
from megazero.moe.tokens import Tokens
from megazero.mpu.context import ParallelContext
from megazero.mpu.group import Group
from megazero.mpu.solo_group import SoloGroup
from megazero.ops.counter_random import derive
from megazero.ops.grouped_linear import Groups
from megazero.spec.experts import CapacitySpec, RouterSpec

JITTER = 1e-2
"""The relative range of the noise that `noisy_gate_policy` Jitter multiplies the router's input by."""
_TINY = torch.finfo(torch.float32).eps
_NOISE = (None, "None", "Jitter", "RSample")

EXPERTS = "deepspeed_moe.experts.deepspeed_experts"
"""The path of the experts in a layer."""
OLD_NAMES: Mapping[str, str] = MappingProxyType(
    {"router.": "deepspeed_moe.gate.wg.", "experts.": f"{EXPERTS}."}
)
"""Prefix of a name in checkpoints of older releases -> the present prefix."""


class _Namespace(nn.Module):
    """Holds modules by name, without a forward."""

    def __init__(self, **parts: nn.Module):
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)


class MoE(nn.Module):
    """A mixture of experts of any kind, as DeepSpeed's layer (Rajbhandari et al. 2022).

    The layer holds all E experts until `megazero.initialize`, which leaves each rank E / ep_size of them.
    Within `zero.Init`, no rank ever holds all of them. Weights and checkpoints do not depend on `ep_size`.

    Each expert is a copy of `expert` with its own initial values (see `ExpertCopies`); DeepSpeed's experts
    all start equal. To set other values, write to ``layer.experts["3"]`` before `initialize`. Parameters have
    DeepSpeed's names: ``deepspeed_moe.gate.wg.weight`` and
    ``deepspeed_moe.experts.deepspeed_experts.3....``, with the expert's number in the layer.

    The router's logits are fp32. The weight of an expert is its softmax probability, for k > 1 divided by the
    sum over the token's experts that have room. The capacity of an expert is ceil(T k / E factor) tokens, at
    least `min_capacity`, for the T tokens of a call on one rank. A full expert keeps, for k = 1, a random
    choice (`use_rts`) or the first tokens; for k = 2, first choices before second ones, each in order; for
    k > 2, the most probable tokens. A token that no expert keeps gets zeros.

    Random numbers are derived from torch's CPU generator, from which each forward that needs them draws once,
    so that a recomputed forward (`torch.utils.checkpoint`) repeats them.

    Args:
        hidden_size: h.
        expert: the module to copy, see `ExpertCopies`; with `use_residual` it is also the dense MLP.
        num_experts: E.
        ep_size: the number of ranks that share the experts; the same in all layers of a model.
        k: the number of experts of each token.
        capacity_factor: the factor in training.
        eval_capacity_factor: the factor in evaluation.
        min_capacity: the least capacity, in tokens.
        use_residual: whether to mix the result with that of a dense MLP, by a learned softmax.
        noisy_gate_policy: in training, ``Jitter`` multiplies the router's input by uniform noise in 0.99 to
            1.01, and ``RSample`` chooses the expert for k = 1 by logits with Gumbel noise.
        drop_tokens: whether capacity is limited; otherwise every token reaches all of its experts.
        use_rts: see above.
        use_tutel: has no effect.
        enable_expert_tensor_parallelism: must be False.
        top2_2nd_expert_sampling: for k = 2, choose the second expert with Gumbel noise in training.

    Raises:
        ConfigError: lists everything that is wrong with the arguments.
    """

    def __init__(
        self,
        hidden_size: int,
        expert: nn.Module,
        num_experts: int = 1,
        ep_size: int = 1,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 4,
        use_residual: bool = False,
        noisy_gate_policy: str | None = None,
        drop_tokens: bool = True,
        use_rts: bool = True,
        use_tutel: bool = False,
        enable_expert_tensor_parallelism: bool = False,
        top2_2nd_expert_sampling: bool = True,
    ):
        _check_counts(hidden_size, num_experts, ep_size, k)
        _check_rules(
            capacity_factor,
            eval_capacity_factor,
            min_capacity,
            noisy_gate_policy,
            enable_expert_tensor_parallelism,
        )
        super().__init__()
        if use_tutel:
            warnings.warn("`use_tutel` changes nothing here: there is one way to dispatch", stacklevel=2)
        if noisy_gate_policy == "RSample" and k > 1:
            warnings.warn(f"`noisy_gate_policy` RSample acts for k = 1 alone, and k is {k}", stacklevel=2)
        self.hidden_size, self.num_experts, self.ep_size, self.k = hidden_size, num_experts, ep_size, k
        sampling: dict[int, Literal["none", "first", "second"]] = {
            1: "first" if noisy_gate_policy == "RSample" else "none"
        }
        if top2_2nd_expert_sampling:
            sampling[2] = "second"
        policies: dict[int, Literal["probs", "position", "random"]] = {
            1: "random" if use_rts else "position",
            2: "position",
        }
        capacity = CapacitySpec(
            capacity_factor if drop_tokens else None,
            eval_capacity_factor if drop_tokens else None,
            min_capacity,
            policies.get(k, "probs"),
            together=True,
        )
        self.spec = RouterSpec(
            k,
            pre_softmax=True,
            sampling=sampling.get(k, "none"),
            jitter=JITTER if noisy_gate_policy == "Jitter" else 0.0,
            capacity=capacity,
        )
        gate = nn.Linear(hidden_size, num_experts, bias=False)
        router = Router(0, gate.get_parameter("weight"), self.spec)
        experts = ExpertCopies(expert, num_experts)
        self.deepspeed_moe = _Namespace(
            gate=_Namespace(wg=router), experts=_Namespace(deepspeed_experts=experts)
        )
        self.register_load_state_dict_pre_hook(_rename)  # type: ignore[no-untyped-call]  # torch's
        self.mlp: nn.Module | None = None
        self.coefficient: nn.Linear | None = None
        if use_residual:
            self.mlp = expert
            self.coefficient = nn.Linear(hidden_size, 2)
        self.group: Group = SoloGroup("ep")
        self.data_rank = 0
        for param in self.experts.parameters():
            # DeepSpeed's tools recognize an expert's parameters by these attributes.
            param.__dict__.update(allreduce=False, group_name=f"ep_size_{ep_size}")

    @property
    def router(self) -> Router:
        """The router."""
        return cast(Router, self.get_submodule("deepspeed_moe.gate.wg"))

    @property
    def experts(self) -> ExpertCopies:
        """The experts on this rank."""
        return cast(ExpertCopies, self.get_submodule(EXPERTS))

    def join(self, context: ParallelContext) -> list[nn.Parameter]:
        """Keep only this rank's experts; return the parameters of the removed ones."""
        self.group, self.data_rank = context.groups["ep"], context.replica.rank
        count = self.num_experts // self.group.size
        return self.experts.keep(self.group.rank * count, count)

    def forward(
        self, hidden_states: Tensor, used_token: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Send each token through its experts.

        Args:
            hidden_states: [..., h].
            used_token: [...], zero for tokens that no expert should see, such as padding; they get zeros.

        Returns:
            The result [..., h]; the balance loss, an fp32 scalar; and how often each expert was chosen before
            choices are dropped, int64 [E]. The balance loss is E sum_e f_e P_e over the tokens of this call,
            with f_e the share of tokens whose first choice is e (for k > 2, of all choices) and P_e the mean
            probability of e; it is 1 if loads are even.

        Raises:
            ConfigError: an argument has a wrong shape.
        """
        if hidden_states.shape[-1] != self.hidden_size:
            raise ConfigError(
                f"`hidden_states` must have `hidden_size` ({self.hidden_size}) as its last dim, but has "
                f"shape {tuple(hidden_states.shape)}; build the layer for that width"
            )
        rows = hidden_states.reshape(-1, self.hidden_size)
        tokens = _tokens_of(rows, used_token)
        inputs = LayerInputs(Rows(range(tokens.count), keys=self._noise_key(rows.device)))
        with torch.autocast(rows.device.type, enabled=False):
            choice = self.router(rows, tokens, inputs)
        kept = kept_choices(self.spec, 0, choice, tokens, inputs)
        if tokens.real is not None:
            real = tokens.real.unsqueeze(1).expand_as(choice.experts)
            kept = real if kept is None else kept & real
        weights = _of_kept(choice.weights, kept)
        placement = ExpertPlacement(self.num_experts, self._run_experts, self.group, 1)
        out = all_to_all_dispatch(placement, rows, weights, choice.experts, kept).view(hidden_states.shape)
        if self.mlp is not None and self.coefficient is not None:
            mix = self.coefficient(hidden_states).softmax(-1)
            out = out * mix[..., :1] + plain_output(self.mlp(hidden_states)) * mix[..., 1:]
        counts = _counts(choice.experts, tokens, self.num_experts)
        counted = 1 if self.k <= 2 else self.k
        balanced = _counts(choice.experts[:, :counted], tokens, self.num_experts)
        total = tokens.lengths[0].clamp_min(1).float()
        return out, switch_loss(balanced.float(), choice.probabilities.sum(0), total, counted), counts

    def _run_experts(self, rows: Tensor, groups: Groups) -> Tensor:
        outputs: Tensor = self.experts(rows, groups.read())
        return outputs

    def _noise_key(self, device: torch.device) -> Tensor | None:
        """Return the key of this forward's random numbers, int64 [1]; None in evaluation."""
        if not self.training:
            return None
        spec, capacity = self.spec, self.spec.capacity
        random = capacity.policy == "random" and capacity.factor is not None
        if not (random or spec.jitter or spec.sampling != "none"):
            return torch.zeros(1, dtype=torch.int64, device=device)
        drawn = torch.randint(2**62, (1,), dtype=torch.int64, device="cpu")
        return derive(drawn, torch.tensor([self.data_rank])).to(device)


def _rename(layer: nn.Module, state: dict[str, Tensor], prefix: str, *_: object) -> None:
    """Rename the entries of an older release in a state dict, in place."""
    for old, new in OLD_NAMES.items():
        for name in [name for name in state if name.startswith(prefix + old)]:
            state[f"{prefix}{new}{name.removeprefix(prefix + old)}"] = state.pop(name)


def _tokens_of(rows: Tensor, used: Tensor | None) -> Tokens:
    """Return the tokens of a call as one sequence: rows [T, h], which are real where `used` is nonzero."""
    count, device = len(rows), rows.device
    if used is not None and used.numel() != count:
        raise ConfigError(
            f"`used_token` must have one entry for each of the {count} tokens, but has {used.numel()}; give "
            "it the shape of `hidden_states` without the last dim"
        )
    alone, positions = SoloGroup("tokens"), torch.arange(count, device=device)
    return Tokens(
        positions,
        torch.zeros(count, dtype=torch.int64, device=device),
        positions,
        None if used is None else used.reshape(-1).to(device) != 0,
        torch.full((1,), count, dtype=torch.int64, device=device),
        alone,
        alone,
    )


def _of_kept(weights: Tensor, kept: Tensor | None) -> Tensor:
    """Return the weights, fp32 [n, k]; for k > 1 normalized over the choices that have room."""
    if weights.shape[1] == 1:
        return weights
    if kept is not None:
        weights = weights * kept
    return weights / weights.sum(1, keepdim=True).clamp_min(_TINY)


def _counts(chosen: Tensor, tokens: Tokens, experts: int) -> Tensor:
    """Return how often real tokens chose each expert, int64 [E]."""
    ones = tokens.masked(torch.ones_like(chosen))
    counts = torch.zeros(experts, dtype=torch.int64, device=chosen.device)
    return counts.scatter_add_(0, chosen.reshape(-1), ones.reshape(-1))


def _check_counts(hidden_size: int, num_experts: int, ep_size: int, k: int) -> None:
    if isinstance(num_experts, Sequence):
        raise ConfigError(
            f"`num_experts` must be one number for one layer, but is {num_experts}; for a pyramid, build "
            "each layer with its own number"
        )
    given = {"hidden_size": hidden_size, "num_experts": num_experts, "ep_size": ep_size, "k": k}
    wrong = [
        f"`{name}` must be a whole number of at least 1, but is {value}"
        for name, value in given.items()
        if not isinstance(value, int) or value < 1
    ]
    if wrong:
        raise ConfigError(wrong)
    if num_experts % ep_size:
        wrong.append(
            f"`num_experts` must be a multiple of `ep_size` ({ep_size}), but is {num_experts}; choose a "
            f"divisor of {num_experts} as `ep_size`"
        )
    if k > num_experts:
        wrong.append(f"`k` must be at most `num_experts` ({num_experts}), but is {k}; choose fewer")
    if wrong:
        raise ConfigError(wrong)


def _check_rules(
    factor: float, eval_factor: float, least: int, noise: str | None, slices_experts: bool
) -> None:
    wrong = [
        f"`{name}` must be above 0, but is {value}; to drop no token, set `drop_tokens` to False"
        for name, value in {"capacity_factor": factor, "eval_capacity_factor": eval_factor}.items()
        if not value > 0
    ]
    if least < 0:
        wrong.append(f"`min_capacity` must be at least 0, but is {least}")
    if noise not in _NOISE:
        wrong.append(f"`noisy_gate_policy` must be Jitter, RSample or None, but is {noise}; choose one")
    if slices_experts:
        wrong.append(
            "`enable_expert_tensor_parallelism` must be False, as experts of any kind are not sliced, but is "
            "True; leave it out, or use a training script such as pretrain_gpt.py"
        )
    if wrong:
        raise ConfigError(wrong)
