"""DeepSpeed's Adam and Adagrad as torch optimizers, for `megazero.initialize` or alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from megazero.deepspeed.optimizers.fused import FusedLion, Options, Params, RuleOptimizer
from megazero.errors import ConfigError
from megazero.optim.compressed.onebit_adam import LATE
from megazero.optim.elementwise import Adagrad, Adam
from megazero.optim.rule import Needs, Pieces, UpdateRule


@dataclass(frozen=True)
class UncorrectedAdam(Adam):
    """AdamW without bias correction of the moments."""

    def step(self, pieces: Pieces, lr: float) -> None:
        super().step(replace(pieces, step=LATE), lr)


@dataclass(frozen=True)
class CoupledAdam(Adam):
    """Adam (Kingma & Ba 2015) with L2 regularization: weight decay is added to the gradient.

    Attributes:
        corrects: whether the bias of the moments is corrected.
    """

    needs: ClassVar[Needs] = Needs()

    corrects: bool = True

    def step(self, pieces: Pieces, lr: float) -> None:
        pieces.check(self.state_names)
        lists = zip(pieces.grads, pieces.params, pieces.weight_decays, strict=True)
        grads = [grad.add(param, alpha=decay) if decay else grad for grad, param, decay in lists]
        step = pieces.step if self.corrects else LATE
        super().step(replace(pieces, grads=grads, weight_decays=[0.0] * len(grads), step=step), lr)


class FusedAdam(RuleOptimizer):
    """DeepSpeed's FusedAdam: AdamW, or Adam with `adam_w_mode` false.

    Args:
        params: parameters or parameter groups.
        lr: learning rate.
        bias_correction: whether the bias of the moments is corrected.
        betas: decays of the moments.
        eps: added to the root of the second moment.
        adam_w_mode: whether weight decay is decoupled from the gradient.
        weight_decay: weight decay; groups may have their own.
        amsgrad: must be false.
        set_grad_none: has no effect; `zero_grad` has an argument for it.

    Raises:
        ConfigError: `amsgrad` is true.
    """

    name = "FusedAdam"

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ):
        if amsgrad:
            raise ConfigError(
                f"`amsgrad` must be false for {self.name}, but is true; use torch.optim.AdamW, which is "
                '`"torch_adam": true` in a JSON'
            )
        options = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps}
        super().__init__(params, {**options, "weight_decay": weight_decay})
        self.adam_w_mode = bool(adam_w_mode)

    def rule_of(self, group: Options) -> UpdateRule:
        beta1, beta2 = map(float, group["betas"])
        eps, corrects = float(group["eps"]), bool(group["bias_correction"])
        if not self.adam_w_mode:
            return CoupledAdam(beta1, beta2, eps, corrects)
        return (Adam if corrects else UncorrectedAdam)(beta1, beta2, eps)


class DeepSpeedCPUAdam(FusedAdam):
    """DeepSpeed's Adam for offloaded weights: `FusedAdam` under another name, for any device.

    Args:
        model_params: parameters or parameter groups.
        lr, bias_correction, betas, eps, weight_decay, amsgrad: see `FusedAdam`.
        adamw_mode: `adam_w_mode` of `FusedAdam`.
        fp32_optimizer_states: has no effect, because moments are always fp32.
    """

    name = "DeepSpeedCPUAdam"

    def __init__(
        self,
        model_params: Params,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ):
        super().__init__(model_params, lr, bias_correction, betas, eps, adamw_mode, weight_decay, amsgrad)


class DeepSpeedCPUAdagrad(RuleOptimizer):
    """DeepSpeed's Adagrad for offloaded weights, for any device; weight decay is added to the gradient.

    Args:
        model_params: parameters or parameter groups.
        lr: learning rate.
        eps: added to the root of the sum of squares.
        weight_decay: weight decay; groups may have their own.
        amsgrad: has no effect, as in DeepSpeed.
        fp32_optimizer_states: has no effect, because sums are always fp32.
    """

    name = "DeepSpeedCPUAdagrad"

    def __init__(
        self,
        model_params: Params,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ):
        super().__init__(model_params, {"lr": lr, "eps": eps, "weight_decay": weight_decay})

    def rule_of(self, group: Options) -> Adagrad:
        return Adagrad(float(group["eps"]))


class DeepSpeedCPULion(FusedLion):
    """DeepSpeed's Lion for offloaded weights: `FusedLion` under another name, for any device.

    Args:
        model_params: parameters or parameter groups.
        lr, betas, weight_decay: see `FusedLion`.
        fp32_optimizer_states: has no effect, because the momentum is always fp32.
    """

    name = "DeepSpeedCPULion"

    def __init__(
        self,
        model_params: Params,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        fp32_optimizer_states: bool = True,
    ):
        super().__init__(model_params, lr, betas, weight_decay)
