"""`deepspeed.linear`: a linear layer with a frozen weight and low-rank adapters (LoRA, arXiv:2106.09685)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from megazero.deepspeed.accelerator.choose import get_accelerator
from megazero.errors import ConfigError

_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass
class LoRAConfig:
    """The adapters of an `OptimizedLinear`.

    Attributes:
        lora_r: the rank of the adapters.
        lora_alpha: the adapters' output is multiplied by ``lora_alpha / lora_r``.
        base_weight_sharding: must be 1; ZeRO stage 3 shards the frozen weight.
        offload: must be false; ZeRO offloads the frozen weight.
        offload_ratio: must be 0.
        delay_lora_init: whether the adapters are made later, by `init_lora`.
        target_mods: the names of modules to which a loader adds adapters.
    """

    lora_r: int = 64
    lora_alpha: float = 16.0
    base_weight_sharding: int = 1
    offload: bool = False
    offload_ratio: float = 0.0
    delay_lora_init: bool = False
    target_mods: list[str] = field(default_factory=lambda: list(_TARGETS))

    def __post_init__(self) -> None:
        if self.base_weight_sharding != 1 or self.offload or self.offload_ratio:
            raise ConfigError(
                "`base_weight_sharding` must be 1 and `offload` false, but the frozen weight is to be "
                "sharded or offloaded; use ZeRO stage 3 with `offload_param` instead"
            )


class OptimizedLinear(nn.Module):
    """A linear layer; with `lora_config` its weight is frozen, and two low-rank matrices are trained.

    Args:
        input_dim, output_dim: the sizes.
        bias: whether there is a bias; must be false with adapters.
        lora_config: the adapters, or None.
        quantization_config: must be None.
        device: the device of the weights; by default the accelerator's.
        dtype: the dtype of the weights.
        linear_cls: the class of the linear layers.

    Raises:
        ConfigError: `quantization_config` is given, or there are a bias and adapters.
    """

    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        bias: bool = False,
        lora_config: LoRAConfig | None = None,
        quantization_config: object = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.bfloat16,
        linear_cls: type[nn.Linear] = nn.Linear,
    ):
        super().__init__()
        if quantization_config is not None:
            raise ConfigError(
                "`quantization_config` must be None, but is given; megazero trains with weights in bf16"
            )
        if bias and lora_config is not None:
            raise ConfigError("`bias` must be false with `lora_config`, but is true; leave it out")
        self.input_dim, self.output_dim, self.lora_config = input_dim, output_dim, lora_config
        device = device or get_accelerator().current_device_name()
        self._make_linear = partial(linear_cls, device=device, dtype=dtype)
        base = self._make_linear(input_dim, output_dim, bias=bias)
        self.weight, self.bias = base.weight, base.bias
        self.disabled = lora_config is None
        if lora_config is not None:
            self.weight.requires_grad = False
            nn.init.xavier_uniform_(self.weight)
            if not lora_config.delay_lora_init:
                self.init_lora()

    def disable(self) -> None:
        """Leave the adapters out of forward."""
        self.disabled = True

    def init_lora(self) -> None:
        """Make the adapters, whose output is 0 initially."""
        if self.disabled or self.lora_config is None:
            return
        rank = self.lora_config.lora_r
        self.lora_scaling_factor = self.lora_config.lora_alpha / rank
        self.lora_weight_1 = self._make_linear(self.input_dim, rank, bias=False)
        self.lora_weight_2 = self._make_linear(rank, self.output_dim, bias=False)
        nn.init.kaiming_uniform_(self.lora_weight_1.weight, a=math.sqrt(5))
        nn.init.zeros_(self.lora_weight_2.weight)

    def full_weight(self) -> Tensor:
        """Return the frozen weight [output_dim, input_dim]."""
        return self.weight

    def forward(self, input_tensor: Tensor) -> Tensor:
        """Map [..., input_dim] to [..., output_dim], the sum of the linear layer and the adapters.

        Raises:
            ConfigError: `init_lora` has not been called.
        """
        output = nn.functional.linear(input_tensor, self.weight, self.bias)
        if self.disabled:
            return output
        if not hasattr(self, "lora_weight_1"):
            raise ConfigError(
                "`init_lora` must be called before forward, because `delay_lora_init` is set, but was not; "
                "call it"
            )
        adapted: Tensor = self.lora_weight_2(self.lora_weight_1(input_tensor))
        return output + self.lora_scaling_factor * adapted


def init_lora(model: nn.Module) -> None:
    """Make the adapters of all `OptimizedLinear` layers, and freeze all other parameters."""
    model.requires_grad_(False)
    for module in model.modules():
        if isinstance(module, OptimizedLinear):
            module.init_lora()
