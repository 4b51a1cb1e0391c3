"""Changes of a model before it is compressed."""

from __future__ import annotations

import torch
from torch import nn

from megazero.errors import ConfigError


@torch.no_grad()
def convert_conv1d_to_linear(model: nn.Module, convert_type: type[nn.Module]) -> nn.Module:
    """Replace layers that keep a weight [in, out], as GPT-2's in transformers do, by `nn.Linear`, in place.

    Args:
        model: the model.
        convert_type: the class of these layers, such as `transformers.pytorch_utils.Conv1D`.

    Raises:
        ConfigError: a layer of the class has no weight of two dims.
    """
    for name, layer in list(model.named_modules()):
        if not isinstance(layer, convert_type):
            continue
        weight, bias = getattr(layer, "weight", None), getattr(layer, "bias", None)
        if weight is None or weight.dim() != 2:
            raise ConfigError(f"`{name}` must have a weight of two dims to become linear, but has not")
        into, out = weight.shape
        linear = nn.Linear(into, out, bias is not None, weight.device, weight.dtype)
        linear.weight.copy_(weight.t())
        if bias is not None:
            linear.bias.copy_(bias)
        parent = model.get_submodule(name.rpartition(".")[0])
        setattr(parent, name.rpartition(".")[2], linear.train(layer.training))
    return model
