"""Whole weights of a sliced model, and whole weights into one."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megazero.deepspeed.tensor_parallel.slices import sliced_of, whole_weight
from megazero.mpu.group import Group


def whole_value(value: Tensor, group: Group) -> Tensor:
    """A parameter's or buffer's whole value; all tensor-parallel ranks call this."""
    sliced = sliced_of(value)
    return value.detach() if sliced is None else whole_weight(value.detach(), sliced, group)


@torch.no_grad()
def fill(model: nn.Module, name: str, whole: Tensor, group: Group) -> None:
    """Write a whole weight into a parameter or buffer, this rank's slice of it."""
    params = dict(model.named_parameters(remove_duplicate=False))  # a tied weight has two names
    target = params[name] if name in params else model.get_buffer(name)
    sliced = sliced_of(target)
    own = whole if sliced is None else sliced.of(whole, group.rank, group.size)
    target.copy_(own)
