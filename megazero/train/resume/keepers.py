"""The state in a checkpoint: for each kind, the tensors that are written, and those that are read.

`StateKeeper.parts` are the tensors to write, `StateKeeper.parts_from` those to read, with the memory to read
them into. A new kind of state is a new keeper in the list of `keepers_of`.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping
from enum import Enum, auto
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from megazero.checkpoint.box import Box
from megazero.checkpoint.part import FP8, RANDOM, ROUTER, WEIGHT, Key, Part, Source
from megazero.checkpoint.saver import together
from megazero.checkpoint.shards import parts_in_use, parts_to_read, parts_to_write
from megazero.errors import CheckpointError, DamagedCheckpointError
from megazero.mpu.context import ParallelContext
from megazero.train.step.engine import Engine
from megazero.zero.delayed import IN_USE
from megazero.zero.optimizer import Optimizer


class StateGroup(Enum):
    """Groups of state. A job may save or load only some of them; the model always."""

    MODEL = auto()
    PROGRESS = auto()
    UPDATES = auto()
    RANDOM = auto()


ALL = frozenset(StateGroup)


class StateKeeper:
    """Saves and loads one kind of state. Methods do nothing unless overridden.

    Attributes:
        group: the group of the state.
        kind: the kind of its logical tensors; None for the optimizer's own kinds.
    """

    group: ClassVar[StateGroup] = StateGroup.MODEL
    kind: ClassVar[str | None] = None

    def parts(self) -> list[Part]:
        """The parts that this rank writes; together, all ranks write each element once."""
        return []

    def parts_from(self, source: Source) -> list[Part]:
        """The parts that this rank reads from the source."""
        return []

    def apply(self, source: Source, where: object) -> None:
        """Apply the state after all keepers' parts were read; every rank calls this.

        `where` names the source in messages.
        """


class Updated(StateKeeper):
    """The optimizer's masters, and optionally its moments; the source must have all of them.

    Args:
        optimizer, context, moments: the state, and whether it includes moments.
        without: names of weights that are not read.
    """

    def __init__(
        self, optimizer: Optimizer, context: ParallelContext, *, moments: bool, without: Collection[str] = ()
    ):
        self.optimizer = optimizer
        self.context = context
        self.moments = moments
        self.without = without

    def parts(self) -> list[Part]:
        return parts_to_write(self.optimizer, self.context, moments=self.moments)

    def parts_from(self, source: Source) -> list[Part]:
        parts = parts_to_read(self.optimizer, self.context, moments=self.moments)
        return [part for part in parts if part.key.name not in self.without]

    def apply(self, source: Source, where: object) -> None:
        self.optimizer.publish()


class StageKeeper(StateKeeper):
    """Tensors, by global name, that are equal on all ranks of a stage; its first rank writes them."""

    def __init__(self, tensors: Mapping[str, Tensor], context: ParallelContext):
        self._writes = not context.groups["stage"].rank
        self._whole = [Part.whole(Key(name, self.kind or WEIGHT), tensor) for name, tensor in tensors.items()]

    def parts(self) -> list[Part]:
        return self._whole if self._writes else []

    def parts_from(self, source: Source) -> list[Part]:
        return [part for part in self._whole if part.key in source.shapes]


class Routers(StageKeeper):
    """The loads and biases of routers. Most converted models have none, and begin with even loads."""

    kind = ROUTER


class Scales(StageKeeper):
    """The scales and amax histories of 8-bit products; a history of another length is not read."""

    group = StateGroup.PROGRESS
    kind = FP8

    def parts_from(self, source: Source) -> list[Part]:
        return [part for part in self._whole if source.shapes.get(part.key) == part.shape]


class InUse(StateKeeper):
    """The weights of the next step, which differ from the masters while a delayed update is not published.

    `Updated` writes them with the masters.
    """

    group = StateGroup.UPDATES
    kind = IN_USE

    def __init__(self, optimizer: Optimizer, context: ParallelContext):
        self.optimizer = optimizer
        self.context = context

    def apply(self, source: Source, where: object) -> None:
        """Read the weights in use, after the masters were published into the same memory."""
        delayed = self.optimizer.delayed
        if delayed is None or all(key.kind != IN_USE for key in source.shapes):
            return
        parts = parts_in_use(self.optimizer, self.context)

        def read() -> None:
            missing = sorted({str(part.key) for part in parts if part.key not in source.shapes})
            if missing:
                raise CheckpointError(
                    f"{where} must hold the weights in use of all parameters, but lacks `{missing[0]}` "
                    f"and {len(missing) - 1} more; load an older one, or leave `--delayed-param-update` out."
                )
            source.read(parts)

        together(self.context, read, f"load {where}")
        delayed.show_in_use()


class Generators(StateKeeper):
    """The random generators of Python, numpy and torch.

    megazero's own random numbers are stateless, but a user's dataset or monitor may use these generators. The
    state of each is a tensor with a row for each rank; it is read only by the same number of ranks.
    """

    group = StateGroup.RANDOM
    kind = RANDOM

    def __init__(self, context: ParallelContext):
        self.context = context
        self._taken: dict[str, Tensor] = {}

    def parts(self) -> list[Part]:
        return self._rows(random_state(self.context.device))

    def parts_from(self, source: Source) -> list[Part]:
        self._taken = random_state(self.context.device)
        rows = self._rows(self._taken)
        if any(source.shapes.get(row.key) != row.shape for row in rows):
            self._taken, rows = {}, []
        return rows

    def apply(self, source: Source, where: object) -> None:
        if self._taken:
            state, device = self._taken, self.context.device
            together(self.context, lambda: set_random_state(state, device), f"load {where}")

    def _rows(self, states: Mapping[str, Tensor]) -> list[Part]:
        context, parts = self.context, []
        for name, state in states.items():
            row = Box((context.rank, *[0] * state.dim()), (1, *state.shape))
            shape = (context.world_size, *state.shape)
            parts.append(Part(Key(name, RANDOM), shape, row, state.unsqueeze(0)))
        return parts


def keepers_of(
    engine: Engine, groups: Collection[StateGroup] = ALL, without: Collection[str] = ()
) -> tuple[StateKeeper, ...]:
    """The keepers of an engine's state, in the order in which they write and apply it.

    Args:
        groups: the groups of state to keep, besides the model.
        without: names of weights that are not read.
    """
    optimizer, context = engine.optimizer, engine.context
    keepers: tuple[StateKeeper, ...] = (
        Updated(optimizer, context, moments=StateGroup.UPDATES in groups, without=without),
        Routers(engine.loads.state(), context),
        Scales(engine.fp8.state(), context),
        InUse(optimizer, context),
        Generators(context),
    )
    return tuple(keeper for keeper in keepers if keeper.group in {StateGroup.MODEL, *groups})


def random_state(device: torch.device) -> dict[str, Tensor]:
    """The state of each generator of this process, as tensors of fixed shape."""
    _, words, gauss = random.getstate()
    state = np.random.get_state()
    assert isinstance(state, tuple), "the legacy generator has a tuple"
    name, keys, position, has_gauss, cached = state
    assert name == "MT19937", name
    states = {
        "python": torch.tensor([*words, gauss is not None], dtype=torch.int64),
        "python_gauss": torch.tensor([gauss or 0.0], dtype=torch.float64),
        "numpy": torch.tensor([*keys.tolist(), position, has_gauss], dtype=torch.int64),
        "numpy_gauss": torch.tensor([cached], dtype=torch.float64),
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_random_state(state: Mapping[str, Tensor], device: torch.device) -> None:
    """Set each generator of this process to a state from `random_state`.

    Raises:
        DamagedCheckpointError: a generator cannot have such a state.
    """
    try:
        *words, has_gauss = state["python"].tolist()
        gauss = state["python_gauss"].item() if has_gauss else None
        random.setstate((3, tuple(words), gauss))
        *keys, position, has_cached = state["numpy"].tolist()
        cached = state["numpy_gauss"].item()
        if not 0 <= position <= len(keys):  # numpy would read out of bounds
            raise ValueError(f"numpy's position is {position} of {len(keys)}")
        np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, has_cached, cached))
        torch.set_rng_state(state["torch"])
        if device.type == "cuda" and "cuda" in state:
            torch.cuda.set_rng_state(state["cuda"], device)
    except (ValueError, OverflowError, RuntimeError) as error:
        raise DamagedCheckpointError(
            f"the random state must be one that a generator can have, but is not: {error}; set --no-load-rng"
        ) from error
