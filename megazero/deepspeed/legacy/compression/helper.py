"""Changes of a model before it is compressed."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from megazero.deepspeed.legacy.compression.settings import Reduction, read_compression
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


def student_initialization(
    student_model: nn.Module, teacher_model: nn.Module, deepspeed_config: Any
) -> nn.Module:
    """Copy a teacher's layers into a student, as `layer_reduction` of the configuration says.

    Raises:
        ConfigError: the section is not enabled, or a layer or module is missing in one of the two.
    """
    reduction = read_compression(deepspeed_config).reduction
    if reduction is None:
        raise ConfigError("`layer_reduction.enabled` must be true to copy a teacher's layers, but is not")
    return copy_layers(student_model, teacher_model, reduction)


@torch.no_grad()
def copy_layers(student: nn.Module, teacher: nn.Module, reduction: Reduction) -> nn.Module:
    """Copy the teacher's layers that `reduction` names, and return the student."""
    pairs = [
        (f"{reduction.prefix}.{number}", f"{reduction.prefix}.{theirs}")
        for number, theirs in enumerate(reduction.layers)
    ]
    for own, theirs in [*pairs, *((name, name) for name in reduction.others)]:
        into, source = _module(student, own, "student"), _module(teacher, theirs, "teacher")
        into.load_state_dict(source.state_dict())
    return student


def _module(model: nn.Module, name: str, whose: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError:
        raise ConfigError(
            f"`layer_reduction` must name modules of the {whose}, but it has no `{name}`; correct "
            "`module_name_prefix`, `teacher_layer` or `other_module_name`"
        ) from None
