"""Members of DeepSpeed's ZeRO optimizers that torch's optimizers lack."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megazero.deepspeed.optimizers.loss_scale import ScaleAndRate
from megazero.deepspeed.zero import fragments
from megazero.deepspeed.zero.parallel import UserParallel
from megazero.zero.optimizer import Optimizer
from megazero.zero.store.store import GRADIENT, WEIGHT


class ShardCalls:
    """The members of a `DeepSpeedOptimizer` that concern single parameters and gradients.

    Args:
        parallel: gathers parameters and reduces gradients.
        shards: this rank's master weights and moments.
        scale: the loss scale, and the optimizer with the parameter groups.
    """

    def __init__(self, parallel: UserParallel, shards: Optimizer, scale: ScaleAndRate):
        self.parallel, self.shards, self._scale = parallel, shards, scale

    @property
    def clip_grad(self) -> float:
        """The largest gradient norm; 0 turns clipping off."""
        return self.shards.clip_grad

    @property
    def partition_gradients(self) -> bool:
        """Whether a rank keeps only its slice of the gradients."""
        return self.parallel.stage >= 2

    @property
    def bit16_groups(self) -> list[list[nn.Parameter]]:
        """The trained parameters of each group."""
        groups = self._scale.optimizer.param_groups
        return [[p for p in group["params"] if p.requires_grad] for group in groups]

    fp16_groups = bit16_groups

    @property
    def fp32_partitioned_groups_flat(self) -> list[Tensor]:
        """This rank's trained fp32 weights, one flat tensor per bucket."""
        store = self.parallel.store
        return [store.at_rest(bucket)[WEIGHT] for bucket in store.buckets if bucket.key.trainable]

    single_partition_of_fp32_groups = fp32_groups_flat = fp32_partitioned_groups_flat

    def has_overflow(self, partition_gradients: bool = True) -> bool:
        """Whether a gradient so far is inf or NaN on some rank; every rank calls this.

        Args:
            partition_gradients: has no effect.
        """
        self.parallel.settle()
        store = self.parallel.store
        trained = [bucket for bucket in store.buckets if bucket.key.trainable]
        count = torch.zeros((), device=self.parallel.context.device)
        for visit in store.stream((GRADIENT,), trained, changes=()):
            for loaded in visit:
                count += (~loaded.flats[GRADIENT].isfinite()).sum().to(count)
        context = self.parallel.context
        for group in (context.replica, context.tp, context.pp):
            group.all_reduce(count).wait()
        return bool(count)

    def refresh_fp32_params(self) -> None:
        """Copy the module's weights to the masters, after the script has changed them."""
        with self.parallel.gathered(write_back=True):
            pass

    def check_overflow(self, partition_gradients: bool = True) -> None:
        """Set `overflow` to the result of `has_overflow`, until the next step."""
        self._scale.overflows = self.has_overflow(partition_gradients)

    def quantize_nontrainable_params(self) -> None:
        """Do nothing: frozen weights are not quantized."""

    def get_full_hp_param(self, param: nn.Parameter, optim_state_key: str | None = None) -> Tensor | None:
        """See `safe_get_full_fp32_param`; with a key, `safe_get_full_optimizer_state`."""
        if optim_state_key is None:
            return fragments.safe_get_full_fp32_param(param)
        return fragments.safe_get_full_optimizer_state(param, optim_state_key)

    def set_full_hp_param(
        self, value: Tensor, param: nn.Parameter, optim_state_key: str | None = None
    ) -> None:
        """See `safe_set_full_fp32_param`; with a key, `safe_set_full_optimizer_state`."""
        if optim_state_key is None:
            fragments.safe_set_full_fp32_param(param, value)
        else:
            fragments.safe_set_full_optimizer_state(param, value, optim_state_key)

    def get_fp32_grad_for_param(self, param: nn.Parameter) -> Tensor | None:
        """See `safe_get_full_grad`."""
        return fragments.safe_get_full_grad(param)

    def set_fp32_grad_for_param(self, value: Tensor, param: nn.Parameter) -> None:
        """See `safe_set_full_grad`."""
        fragments.safe_set_full_grad(param, value)
