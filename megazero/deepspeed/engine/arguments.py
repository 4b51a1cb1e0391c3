"""The arguments of `initialize`, in every form that scripts pass."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from megazero.config.deepspeed.extras import Extras
from megazero.config.deepspeed.load import load_ds_config
from megazero.deepspeed.config.settings import JsonSource
from megazero.deepspeed.optimizers.fused import ParamGroups, Params
from megazero.errors import ConfigError

DeepSpeedOptimizerCallable = Callable[[Iterable[Any]], Optimizer]
"""Makes an optimizer of parameters or parameter groups."""

DeepSpeedSchedulerCallable = Callable[[Optimizer], object]
"""Makes a schedule of a torch optimizer."""


def readable(source: object) -> JsonSource:
    """A configuration as the path of a file that exists, or else as its content.

    Args:
        source: a path, the content, a `DeepSpeedConfig`, or URL-safe base64 (from accelerate's launcher).

    Raises:
        ConfigError: it is none of these.
    """
    if isinstance(source, (str, os.PathLike)) and os.path.exists(source):
        return source
    return load_ds_config(source)


def check_local_rank(args: Any) -> None:
    """Set `args.local_rank` to the launcher's LOCAL_RANK.

    Raises:
        ConfigError: it has another value already.
    """
    given, local = getattr(args, "local_rank", None), os.environ.get("LOCAL_RANK")
    if given is None or local is None or not local.isdigit():
        return
    if isinstance(given, int) and given >= 0 and given != int(local):
        raise ConfigError(
            f"`args.local_rank` must be the launcher's LOCAL_RANK ({local}), but is {given}; leave it to the "
            "launcher"
        )
    args.local_rank = int(local)


def params_of(model: nn.Module, params: Params | None) -> ParamGroups:
    """The parameters or parameter groups for an optimizer; by default all trained parameters."""
    if params is None:
        return [param for param in model.parameters() if param.requires_grad]
    return list(params)  # type: ignore[return-value]  # all are parameters, or all are groups


def check_groups(client: Optimizer) -> None:
    """Drop empty parameter groups.

    Raises:
        ConfigError: a parameter occurs twice.
    """
    client.param_groups[:] = [group for group in client.param_groups if group["params"]]
    places = Counter(id(param) for group in client.param_groups for param in group["params"])
    twice = sum(count > 1 for count in places.values())
    if twice:
        raise ConfigError(
            f"`optimizer` must hold each parameter once, but holds {twice} of {len(places)} several times; "
            "leave them out of all groups but one"
        )


@dataclass(frozen=True)
class Mesh:
    """The layout of `mesh_param` or of the JSON, as an `mpu` object.

    Attributes:
        replicas: the data-parallel size; None if it follows from the number of ranks.
        sequence: the sequence-parallel size.
    """

    replicas: int | None
    sequence: int

    def get_data_parallel_world_size(self) -> int | None:
        """The data-parallel size, if it was given."""
        return self.replicas

    def get_sequence_parallel_world_size(self) -> int:
        """The sequence-parallel size."""
        return self.sequence

    def check(self, replicas: int) -> None:
        """Compare the data-parallel size with that of the world, `replicas`.

        Raises:
            ConfigError: they differ.
        """
        if self.replicas not in (None, replicas):
            raise ConfigError(
                f"`data_parallel_size` must be the number of replicas of {self.sequence} ranks each "
                f"({replicas}), but is {self.replicas}; correct it, or start other ranks"
            )


def mesh_of(extras: Extras) -> Mesh | None:
    """The layout in a JSON; None if it specifies none."""
    ranks = extras.ranks
    if ranks.sequence_parallel_size == 1 and ranks.data_parallel_size is None:
        return None
    return Mesh(ranks.data_parallel_size, ranks.sequence_parallel_size)
