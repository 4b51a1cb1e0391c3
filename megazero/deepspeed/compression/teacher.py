"""A student that begins with some of its teacher's layers (layer reduction, XTC's first step)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from megazero.deepspeed.compression.settings import Reduction, read_compression
from megazero.errors import ConfigError


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
