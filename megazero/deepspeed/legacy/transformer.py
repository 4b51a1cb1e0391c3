"""`ops.transformer`: an encoder layer with the parameters of DeepSpeed's kernel, on torch's operators."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megazero.deepspeed.accelerator.choose import get_accelerator
from megazero.errors import ConfigError


@dataclass
class DeepSpeedTransformerConfig:
    """The sizes and dropout probabilities of a layer.

    Args:
        batch_size: has no effect.
        hidden_size: h, the model width.
        intermediate_size: the width of the MLP; four times `hidden_size` by default.
        heads: the number of attention heads.
        attn_dropout_ratio: the dropout probability of attention weights; negative for none.
        hidden_dropout_ratio: the dropout probability of the outputs of attention and MLP; negative for none.
        num_hidden_layers: the number of layers in the model, which scales initial weights.
        initializer_range: the standard deviation of initial weights.
        layer_norm_eps: the epsilon of the layer norms.
        local_rank: the CUDA device to select; -1 selects none.
        seed: has no effect; torch's generator is used.
        fp16: whether parameters are fp16.
        pre_layer_norm: whether norms come before the attention and the MLP, or after them.
        normalize_invertible, gelu_checkpoint, attn_dropout_checkpoint, stochastic_mode: have no effect; they
            save memory or time in DeepSpeed's kernel and do not change the numbers.
        adjust_init_range: whether weights that write to the residual stream start smaller.
        return_tuple: whether the layer returns a tuple of its output.
        training: has no effect; `Module.train` decides.
    """

    batch_size: int = -1
    hidden_size: int = -1
    intermediate_size: int = -1
    heads: int = -1
    attn_dropout_ratio: float = -1
    hidden_dropout_ratio: float = -1
    num_hidden_layers: int = -1
    initializer_range: float = -1
    layer_norm_eps: float = 1e-12
    local_rank: int = -1
    seed: int = -1
    fp16: bool = False
    pre_layer_norm: bool = True
    normalize_invertible: bool = False
    gelu_checkpoint: bool = False
    adjust_init_range: bool = True
    attn_dropout_checkpoint: bool = False
    stochastic_mode: bool = False
    return_tuple: bool = False
    training: bool = True

    def __post_init__(self) -> None:
        if self.intermediate_size <= 0:
            self.intermediate_size = 4 * self.hidden_size

    @property
    def dropouts(self) -> tuple[float, float]:
        """The dropout probabilities of attention weights and of outputs."""
        return max(self.attn_dropout_ratio, 0.0), max(self.hidden_dropout_ratio, 0.0)

    @classmethod
    def from_dict(cls, json_object: Mapping[str, Any]) -> DeepSpeedTransformerConfig:
        """Read a dictionary."""
        return cls(**json_object)

    @classmethod
    def from_json_file(cls, json_file: str) -> DeepSpeedTransformerConfig:
        """Read a JSON file."""
        return cls.from_dict(json.loads(Path(json_file).read_text(encoding="utf-8")))


class DeepSpeedTransformerLayer(nn.Module):
    """Attention and MLP of an encoder; GELU is the tanh approximation, as in DeepSpeed's kernel.

    Args:
        config: the sizes.
        initial_weights: the weights of query, key, value, attention's output, its norm, the MLP's two layers
            and its norm.
        initial_biases: their biases.

    Raises:
        ConfigError: a size is missing, or `heads` does not divide `hidden_size`.
    """

    attn_qkvw: Tensor
    attn_qkvb: Tensor
    attn_ow: Tensor
    attn_ob: Tensor
    inter_w: Tensor
    inter_b: Tensor
    output_w: Tensor
    output_b: Tensor

    def __init__(
        self,
        config: DeepSpeedTransformerConfig,
        initial_weights: Sequence[Tensor] | None = None,
        initial_biases: Sequence[Tensor] | None = None,
    ):
        super().__init__()
        self.config = config
        width, inner = config.hidden_size, config.intermediate_size
        if config.heads < 1 or width < 1 or width % config.heads:
            raise ConfigError(
                f"`hidden_size` must be a multiple of `heads` ({config.heads}), but is {width}; set both"
            )
        dtype = torch.float16 if config.fp16 else torch.float32
        if config.local_rank >= 0:
            get_accelerator().set_device(config.local_rank)
        shapes = {"attn_qkv": (3 * width, width), "attn_o": (width, width), "attn_n": (width,)}
        shapes |= {"inter_": (inner, width), "output_": (width, inner), "norm_": (width,)}
        for name, shape in shapes.items():
            setattr(self, f"{name}w", nn.Parameter(torch.empty(shape, dtype=dtype)))
            setattr(self, f"{name}b", nn.Parameter(torch.zeros(shape[0], dtype=dtype)))
        self.init_transformer_weights(config.adjust_init_range)
        for kind, values in (("w", initial_weights), ("b", initial_biases)):
            if values is not None:
                self._copy(kind, values)

    def init_transformer_weights(self, adjust_init_range: bool = False) -> None:
        """Initialize the parameters: biases are 0, norm weights 1, and the rest normal."""
        deviation = abs(self.config.initializer_range)
        residual = deviation / math.sqrt(2.0 * max(self.config.num_hidden_layers, 1))
        for name, param in self.named_parameters():
            if name.endswith("b"):
                nn.init.zeros_(param)
            elif name in ("attn_nw", "norm_w"):
                nn.init.ones_(param)
            else:
                smaller = adjust_init_range and name in ("attn_ow", "output_w")
                nn.init.normal_(param, std=residual if smaller else deviation)

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, *args: object, **kwargs: object
    ) -> Tensor | tuple[Tensor]:
        """Map ``[b, s, h]`` to ``[b, s, h]``.

        Args:
            hidden_states: ``[b, s, h]``.
            attention_mask: ``[b, 1, 1, s]``, added to the attention scores.
            args, kwargs: further arguments of Hugging Face's layers, each of which must be None or False.

        Raises:
            ConfigError: a further argument is set.
        """
        if any(value is not None and value is not False for value in (*args, *kwargs.values())):
            raise ConfigError(
                "`DeepSpeedTransformerLayer` must be given hidden states and a mask alone, but is given "
                "more; leave out head masks, caches and `output_attentions`"
            )
        first = self._norm(hidden_states, "norm_") if self.config.pre_layer_norm else hidden_states
        attended = hidden_states + self._dropped(self._attention(first, attention_mask))
        second = self._norm(attended, "attn_n")
        inner = F.gelu(F.linear(second, self.inter_w, self.inter_b), approximate="tanh")
        change = self._dropped(F.linear(inner, self.output_w, self.output_b))
        output = attended + change if self.config.pre_layer_norm else self._norm(second + change, "norm_")
        return (output,) if self.config.return_tuple else output

    def _attention(self, x: Tensor, mask: Tensor | None) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (self.config.heads, -1)).transpose(1, 2)
            for part in F.linear(x, self.attn_qkvw, self.attn_qkvb).chunk(3, dim=-1)
        )
        dropout = self.config.dropouts[0] if self.training else 0.0
        context = F.scaled_dot_product_attention(
            query, key, value, None if mask is None else mask.to(x.dtype), dropout
        )
        return F.linear(context.transpose(1, 2).flatten(2), self.attn_ow, self.attn_ob)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight, bias = getattr(self, f"{name}w"), getattr(self, f"{name}b")
        return F.layer_norm(x, weight.shape, weight, bias, self.config.layer_norm_eps)

    def _dropped(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.config.dropouts[1], self.training)

    def _copy(self, kind: str, values: Sequence[Tensor]) -> None:
        """Copy initial weights ("w") or biases ("b"); query, key and value are fused."""
        names = ("attn_qkv", "attn_o", "attn_n", "inter_", "output_", "norm_")
        with torch.no_grad():
            for name, value in zip(names, (torch.cat(tuple(values[:3])), *values[3:]), strict=True):
                getattr(self, f"{name}{kind}").copy_(value)
