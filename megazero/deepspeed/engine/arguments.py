"""The arguments of `initialize` in all the forms that scripts give them in."""

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
from megazero.errors import ConfigError

DeepSpeedOptimizerCallable = Callable[[Iterable[Any]], Optimizer]
"""Makes an optimizer from parameters or groups."""

DeepSpeedSchedulerCallable = Callable[[Optimizer], Any]
"""Makes a schedule from the torch optimizer."""


def readable(source: Any) -> JsonSource:
    """A configuration as the path of a file, or as the content of anything else.

    Args:
        source: a path, the content, a `DeepSpeedConfig`, or JSON as URL-safe base64 (accelerate's launcher).

    Raises:
        ConfigError: it is something else.
    """
    named = isinstance(source, (str, os.PathLike)) and os.path.exists(source)
    return source if named else load_ds_config(source)


def check_local_rank(args: Any) -> None:
    """Hold `args.local_rank` against the launcher's, and set it.

    Raises:
        ConfigError: it is another rank's.
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


def params_of(model: nn.Module, given: Iterable[Any] | None) -> list[Any]:
    """The parameters or groups for an optimizer: those that were given, or all that are trained."""
    if given is None:
        return [param for param in model.parameters() if param.requires_grad]
    return list(given)


def check_groups(client: Optimizer) -> None:
    """Drop empty parameter groups.

    Raises:
        ConfigError: a parameter is in two places.
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
    """The layout that `mesh_param` or the JSON asks for, as an `mpu` tells it.

    Attributes:
        replicas: ranks with samples of their own; None for as many as there are.
        sequence: ranks that share a sequence.
    """

    replicas: int | None
    sequence: int

    def get_data_parallel_world_size(self) -> int | None:
        """The number of ranks with samples of their own, if it was given."""
        return self.replicas

    def get_sequence_parallel_world_size(self) -> int:
        """The number of ranks that share a sequence."""
        return self.sequence

    def check(self, replicas: int) -> None:
        """Hold the layout against the ranks that there are.

        Raises:
            ConfigError: they make another number of replicas.
        """
        if self.replicas not in (None, replicas):
            raise ConfigError(
                f"`data_parallel_size` must be the number of replicas of {self.sequence} ranks each "
                f"({replicas}), but is {self.replicas}; correct it, or start other ranks"
            )


def mesh_of(extras: Extras) -> Mesh | None:
    """The layout in a JSON; None if it names none."""
    ranks = extras.ranks
    if ranks.sequence_parallel_size == 1 and ranks.data_parallel_size is None:
        return None
    return Mesh(ranks.data_parallel_size, ranks.sequence_parallel_size)
