"""The hooks of a model of ZeRO stage 3 as libraries take them off around generation, and put them back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import nn

from megazero.deepspeed.zero.gathered import external_parameters

EXTERNAL = "ds_external_parameters"
"""The method of a stage-3 module that lists what `register_external_parameter` recorded for it."""


class DeepSpeedZeRoOffload:
    """A stage-3 model without an optimizer, or the part of an optimizer that gathers its weights.

    Our hooks are not among `forward_hooks` and `backward_hooks`: where weights are whole, as within
    `GatheredParameters`, they have nothing to do, so that they may stay while a library removes those.

    Attributes:
        module: the model.
        forward_hooks, backward_hooks: empty; a library may replace them.

    Args:
        module: the model.
        free: frees what is gathered.
    """

    def __init__(self, module: nn.Module, free: Callable[[], None]):
        self.module, self._free = module, free
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []
        module.__dict__[EXTERNAL] = partial(_external, module)

    def _register_deepspeed_module(self, module: nn.Module, count: Any = None) -> None:
        """Do nothing: the hooks are there."""

    def partition_all_parameters(self) -> None:
        """Free the weights that have been gathered and kept for their next use."""
        self._free()

    empty_partition_cache = partition_all_parameters


def _external(module: nn.Module) -> Iterator[tuple[int, nn.Parameter]]:
    return enumerate(external_parameters(module))
