"""`DeepSpeedOptimizer`: the optimizer that `megazero.initialize` returns, over shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from megazero.config.deepspeed.extras import Extras
from megazero.deepspeed.optimizers.choose import of_json
from megazero.deepspeed.optimizers.fused import ParamGroups
from megazero.deepspeed.optimizers.grouped_rule import rates
from megazero.deepspeed.optimizers.loss_scale import ScaleAndRate
from megazero.deepspeed.optimizers.shard_calls import ShardCalls
from megazero.deepspeed.optimizers.torch_rule import RuleOf
from megazero.deepspeed.utils.parts import made_of
from megazero.deepspeed.zero.gathered import DeepSpeedZeRoOffload
from megazero.deepspeed.zero.parallel import UserParallel
from megazero.deepspeed.zero.states import ZeroMemory
from megazero.errors import ConfigError, MegazeroError
from megazero.optim.elementwise import Adam
from megazero.optim.loss_scaler import LossScaler, ScalerState
from megazero.optim.rule import UpdateRule
from megazero.zero.optimizer import Optimizer, StepReport

UserOptimizer = torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer]
"""A torch optimizer, or a function that makes one of parameters or groups."""


def build_torch_optimizer(
    optimizer: UserOptimizer | None, params: ParamGroups, extras: Extras
) -> torch.optim.Optimizer | None:
    """The torch optimizer whose groups and options the engine uses; None if there is none.

    Args:
        optimizer: the script's optimizer, or a function that makes one of `params`; takes precedence over
            the JSON's.
        params: parameters or parameter groups.
        extras: names the JSON's optimizer.

    Raises:
        ConfigError: `optimizer` is no optimizer, or the JSON's cannot be built.
    """
    if isinstance(optimizer, torch.optim.Optimizer):
        return optimizer
    if optimizer is not None:
        made: object = optimizer(params) if callable(optimizer) else optimizer
        if not isinstance(made, torch.optim.Optimizer):
            does = f"{'gives' if callable(optimizer) else 'is'} a {type(made).__name__}"
            raise ConfigError(
                f"`optimizer` must be a torch.optim.Optimizer or a function that makes one, but {does}"
            )
        return made
    if extras.optimizer is None:
        return None
    if not params:
        raise ConfigError(
            "`model_parameters` must hold parameters for the configuration's optimizer, but holds none; pass "
            "the model's, or leave the optimizer out to evaluate"
        )
    return of_json(extras.optimizer, params)


def idle_optimizer() -> torch.optim.Optimizer:
    """An optimizer without groups, for an engine that only evaluates."""
    optimizer = torch.optim.SGD([{"params": []}], lr=0.0)
    optimizer.param_groups.clear()
    return optimizer


def idle_rule(groups: object) -> UpdateRule:
    """The rule of an optimizer without groups."""
    return Adam(0.9, 0.999, 1e-8)


@made_of(
    {
        "_scale": (
            ScaleAndRate,
            "scaler scaler_state report steps cur_scale loss_scale loss_scaler loss_scale_config "
            "dynamic_loss_scale override_loss_scale overflow _global_grad_norm set_lr get_lr",
        ),
        "_calls": (
            ShardCalls,
            "clip_grad partition_gradients bit16_groups fp16_groups fp32_partitioned_groups_flat "
            "single_partition_of_fp32_groups fp32_groups_flat has_overflow refresh_fp32_params "
            "check_overflow quantize_nontrainable_params get_full_hp_param set_full_hp_param "
            "get_fp32_grad_for_param set_fp32_grad_for_param",
        ),
        "_memory": (ZeroMemory, "offload_states reload_states empty_partition_cache"),
    }
)
class DeepSpeedOptimizer(torch.optim.Optimizer):
    """A torch optimizer whose step sums gradients, unscales, clips and updates this rank's shards.

    Its `param_groups` are those of `client`, so a schedule that was built on `client` takes effect.

    Attributes:
        optimizer: the torch optimizer with groups and options; its own `step` is not called.
        parallel: gathers parameters and reduces gradients.
        shards: this rank's master weights and moments.
        offload: DeepSpeed's object with the hooks of stage 3; None at lower stages.

    Args:
        client: the torch optimizer with groups and options.
        rule_of: see `choose_rule`.
        parallel: the model's data parallelism.
        shards: the model's shards.
        scaler: decides the loss scale.
        divisor: divides gradients before they are summed over ranks; the sums are divided by the number of
            ranks / `divisor`.
    """

    custom_loss_scaler = False
    scaler: LossScaler
    scaler_state: ScalerState
    report: StepReport | None
    steps: int
    cur_scale: float
    overflow: bool

    def __init__(
        self,
        client: torch.optim.Optimizer,
        rule_of: RuleOf,
        parallel: UserParallel,
        shards: Optimizer,
        scaler: LossScaler,
        divisor: float,
    ):
        torch.optim.Optimizer.__init__(self, client.param_groups or [{"params": []}], dict(client.defaults))
        self.param_groups = client.param_groups
        self.optimizer = client
        self.parallel, self.shards = parallel, shards
        self._scale = ScaleAndRate(scaler, self)
        self._calls, self._memory = ShardCalls(parallel, shards, self._scale), ZeroMemory(parallel)
        parallel.optimizer = self
        sharded = parallel.stage == 3
        self.offload = DeepSpeedZeRoOffload(parallel.module, parallel.free) if sharded else None
        if sharded:
            self.parameter_offload = self.offload
        self._rule_of, self._divisor, self._pending = rule_of, divisor, False

    @property
    def loss_factor(self) -> float:
        """The factor by which a mean loss is multiplied before backward."""
        return self._scale.scaler_state.scale / self._divisor

    @property
    def idle(self) -> bool:
        """Whether the engine only evaluates, because there is no optimizer."""
        return not self.param_groups

    @property
    def sum_to_mean(self) -> float:
        """The factor from gradient sums to means over ranks; both keep the loss scale."""
        return self._divisor / self.parallel.group.size

    @property
    def shows_gradients(self) -> bool:
        """Whether ``param.grad`` shows gradients after a backward: at stage 0, if each rank has them whole.

        At other stages it does not, even on one rank, because a script's changes, such as clipping, would
        act on this rank's gradients alone.
        """
        if self.parallel.stage != 0:
            return False
        store = self.parallel.store
        trained = [bucket for bucket in store.buckets if bucket.key.trainable]
        return not (
            store.tiers
            or any(bucket.layout.row.shard_grads or bucket.layout.row.shard_state for bucket in trained)
        )

    def begin(self) -> None:
        """Prepare for a backward; the first one of a step drops the previous step's gradients."""
        if not self._pending:
            self.parallel.start(self.shards.updates)
            self._pending = True

    def step(self, closure: object = None) -> Any:
        """Update the weights by the gradients so far; every rank calls this.

        Raises:
            MegazeroError: there has been no backward since the last step.
            ConfigError: groups differ in an option that they must share, or a parameter that requires
                gradients was frozen when the engine was built.
        """
        if closure is not None:
            raise ConfigError("`closure` must not be given: gradients come from `engine.backward`")
        if not self._pending:
            raise MegazeroError("`step` must follow a backward, but there was none; call `engine.backward`")
        self._check_frozen()
        self.parallel.finish()
        self._pending, self._scale.overflows = False, None
        self.shards.rule = self._rule_of(self.param_groups)
        scale = self._scale
        scale.report = self.shards.step(
            rates(self.shards.rule, self.param_groups),
            [float(group.get("weight_decay", 0.0)) for group in self.param_groups],
            self._divisor / (scale.scaler_state.scale * self.parallel.group.size),
        )
        scale.scaler_state = scale.scaler.update(scale.scaler_state, scale.overflow)
        scale.steps += 1
        # Otherwise a schedule that was built on `client` warns that its optimizer never steps.
        self.optimizer.__dict__["_opt_called"] = True

    def _check_frozen(self) -> None:
        """Refuse parameters that were frozen when the engine was built and require gradients now."""
        fixed = [p for b in self.parallel.store.buckets if not b.key.trainable for p in b.params]
        if thawed := {id(param) for param in fixed if param.requires_grad}:
            name = next(name for name, p in self.parallel.module.named_parameters() if id(p) in thawed)
            raise ConfigError(
                "`requires_grad` of a parameter that was frozen when the engine was made must stay False, "
                f"but is True for {name}; freeze it after `initialize`, or call `initialize` again"
            )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients so far; every rank calls this."""
        for param in self.parallel.arrived.values():
            param.grad = None
        if self._pending:
            self.parallel.finish()
            self._pending = False

    def drop(self) -> None:
        """Forget the gradients so far, because a backward has failed."""
        self._pending = False

    def options(self) -> list[dict[str, object]]:
        """The groups without their parameters."""
        return [{k: v for k, v in group.items() if k != "params"} for group in self.param_groups]

    def set_options(self, options: Sequence[Mapping[str, object]]) -> None:
        """Set the options of the groups, as `options` returned them.

        Raises:
            ConfigError: the number of groups differs.
        """
        if len(options) != len(self.param_groups):
            raise ConfigError(
                f"`param_groups` must be as many as were saved ({len(options)}), but are "
                f"{len(self.param_groups)}; build the optimizer as it was"
            )
        for group, saved in zip(self.param_groups, options, strict=True):
            group.update(saved)

    def state_dict(self) -> dict[str, Any]:
        """This rank's shards, the options of the groups, and the loss scale."""
        store = self.shards.store
        return {
            "state": {number: dict(store.at_rest(bucket)) for number, bucket in enumerate(store.buckets)},
            "param_groups": self.options(),
            "updates": self.shards.updates,
            "scaler": vars(self._scale.scaler_state).copy(),
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a `state_dict` of this rank in the same layout; every rank calls this.

        Raises:
            ConfigError: it is of another layout, or has another number of groups.
        """
        own, loaded = self.state_dict()["state"], state_dict["state"]
        shapes = [
            {i: {kind: tuple(t.shape) for kind, t in kinds.items()} for i, kinds in state.items()}
            for state in (own, loaded)
        ]
        if shapes[0] != shapes[1]:
            raise ConfigError(
                "`state_dict` must be of the same model and layout, but has other shards; use "
                "`engine.save_checkpoint`, which any layout loads"
            )
        self.set_options(state_dict["param_groups"])
        for i, kinds in own.items():
            for kind, tensor in kinds.items():
                tensor.copy_(loaded[i][kind])
        self.shards.updates = state_dict["updates"]
        self._scale.scaler_state = ScalerState(**state_dict["scaler"])
        self.zero_grad()
        self.shards.publish()
