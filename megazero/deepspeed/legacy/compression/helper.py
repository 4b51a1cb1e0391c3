"""Changes to a model before it is compressed."""

from __future__ import annotations

import torch
from torch import nn

from megazero.deepspeed.legacy.compression.settings import LayerReduction, read_compression
from megazero.errors import ConfigError


@torch.no_grad()
def convert_conv1d_to_linear(model: nn.Module, convert_type: type[nn.Module]) -> nn.Module:
    """Replace layers whose weight is [in, out], such as GPT-2's in transformers, by `nn.Linear`, in place.

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
            raise ConfigError(f"`{name}` must have a weight of two dims to become linear, but has none")
        into, out = weight.shape
        linear = nn.Linear(into, out, bias is not None, weight.device, weight.dtype)
        linear.weight.copy_(weight.t())
        if bias is not None:
            linear.bias.copy_(bias)
        parent = model.get_submodule(name.rpartition(".")[0])
        setattr(parent, name.rpartition(".")[2], linear.train(layer.training))
    return model


def student_initialization(
    student_model: nn.Module, teacher_model: nn.Module, deepspeed_config: object
) -> nn.Module:
    """Copy a teacher's layers into a student, by the section `layer_reduction`; return the student.

    Raises:
        ConfigError: the section is not enabled, or the teacher or the student lacks a module.
    """
    reduction = read_compression(deepspeed_config).reduction
    if reduction is None:
        raise ConfigError("`layer_reduction.enabled` must be true to copy a teacher's layers, but is not")
    return copy_layers(student_model, teacher_model, reduction)


@torch.no_grad()
def copy_layers(student: nn.Module, teacher: nn.Module, reduction: LayerReduction) -> nn.Module:
    """Copy the teacher's layers that `reduction` names into the student; return the student."""
    names = [
        (f"{reduction.prefix}.{target}", f"{reduction.prefix}.{source}")
        for target, source in enumerate(reduction.layers)
    ]
    for target, source in [*names, *((name, name) for name in reduction.others)]:
        module = _module(student, target, "student")
        module.load_state_dict(_module(teacher, source, "teacher").state_dict())
    return student


def _module(model: nn.Module, name: str, role: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError:
        raise ConfigError(
            f"`layer_reduction` must name modules of the {role}, but it has no `{name}`; correct "
            "`module_name_prefix`, `teacher_layer` or `other_module_name`"
        ) from None
