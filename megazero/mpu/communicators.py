"""`CommunicatorPlan`: the communicators that a rank opens, their priorities, and what each is for.

A value: the same arguments give the same plan, on any machine. Names that span the same ranks share one
communicator, which costs memory and time to connect. A few have a second one beside them, over the same
ranks: a communicator of NCCL has one stream, on which a call waits for those made before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from megazero.mpu.grid import COMMUNICATORS, ProcessGrid, Ranks

TIED_STAGES = (0, -1)
"""The pipeline stages that hold a tied weight: embedding and head."""

# What each name is for, and whether its calls run beside computation: these are urgent.
_USES: Mapping[str, tuple[str, bool]] = MappingProxyType(
    {
        "pp": ("messages between pipeline stages", True),
        "cp": ("parts of a sequence", True),
        "cp_inner": ("heads of a part of a sequence", True),
        "cp_outer": ("keys and values between such parts", True),
        "tp": ("sums and gathers of activations", True),
        "sequence": ("rows and tokens of a sequence", True),
        "ep": ("slices of experts", True),
        "etp": ("slices of an expert", True),
        "data": ("samples", False),
        "replica": ("sums of gradients, gathers of weights", True),
        "expert_replica": ("sums of experts' gradients, gathers of their weights", True),
        "expert": ("tokens on their way to experts", True),
        "batch": ("totals of a batch", False),
        "stage": ("what a stage agrees on", False),
        "model": ("what a model agrees on", False),
        "world": ("norms, flags", False),
        "tied": ("gradients of a tied weight", False),
        "node": ("gathers and sums within a node", True),
        "peers": ("sums between nodes", True),
        "replica_gather": ("gathers of weights beside sums of gradients", True),
        "expert_replica_gather": ("gathers of experts' weights beside sums of their gradients", True),
        "pp_odd": ("messages over every other link of the pipeline", True),
    }
)

# The second communicators, by the name beside which each is.
_BESIDE = MappingProxyType(
    {"replica_gather": "replica", "expert_replica_gather": "expert_replica", "pp_odd": "pp"}
)


@dataclass(frozen=True)
class Communicator:
    """One communicator of a rank.

    Attributes:
        names: the names that share it; the first is its own.
        ranks: the members' world ranks, in group order.
        urgent: whether its calls run during computation, so that its stream gets a higher priority.
        second: whether it is the second communicator over the same ranks.
    """

    names: tuple[str, ...]
    ranks: Ranks
    urgent: bool
    second: bool

    @property
    def name(self) -> str:
        """Its own name, which logs and errors use."""
        return self.names[0]

    @property
    def purpose(self) -> str:
        """Its uses, in words."""
        return "; ".join(_USES[name][0] for name in self.names)


@dataclass(frozen=True)
class CommunicatorPlan:
    """The communicators of one rank, in the order in which every rank opens its own.

    Attributes:
        communicators: all of them, including those of a single rank, over which nothing is sent.
    """

    communicators: tuple[Communicator, ...]

    @classmethod
    def of(
        cls, grid: ProcessGrid, rank: int, *, node_size: int = 1, seconds: Sequence[str] = ()
    ) -> CommunicatorPlan:
        """The communicators of `rank`.

        Args:
            grid: the sizes of the axes.
            rank: the rank.
            node_size: the number of replicas that ``node`` spans.
            seconds: the second communicators, such as `second_communicators` names.
        """
        spans = {name: grid.members(rank, axes) for name, axes in COMMUNICATORS.items()}
        spans |= {"cp_inner": grid.context_block(rank), "cp_outer": grid.context_peers(rank)}
        spans |= {name: spans[_BESIDE[name]] for name in seconds}
        # Last, as only some stages have the first of them: torch names a group after the number of those that
        # a process has opened before, so all members must have opened as many.
        spans |= {
            "tied": grid.at_stages(rank, TIED_STAGES),
            "node": grid.node(rank, node_size),
            "peers": grid.peers(rank, node_size),
        }
        shared: dict[tuple[bool, Ranks], list[str]] = {}
        for name, ranks in spans.items():
            shared.setdefault((name in _BESIDE, ranks), []).append(name)
        return cls(
            tuple(
                Communicator(tuple(names), ranks, any(_USES[name][1] for name in names), second)
                for (second, ranks), names in shared.items()
            )
        )

    def named(self, name: str) -> Communicator:
        """The communicator that a name stands for."""
        return next(c for c in self.communicators if name in c.names)

    def table(self) -> list[str]:
        """A line for each communicator of more than one rank: name, ranks, priority and purpose."""
        return [
            f"{c.name:<22}{len(c.ranks):>6} ranks   {'high' if c.urgent else 'normal':<9}{c.purpose}"
            for c in self.communicators
            if len(c.ranks) > 1
        ]


def second_communicators(grid: ProcessGrid, zero_stage: int) -> tuple[str, ...]:
    """The second communicators that let calls of a training overlap.

    From stage 1 on, weights are gathered while gradients are summed, or while a step begins with totals of
    its batch. A stage with two neighbours, of more than two stages, has messages to and from both.

    Args:
        grid: the sizes of the axes.
        zero_stage: what is sharded over the replicas.
    """
    gathers = tuple(name for name in _BESIDE if name != "pp_odd") if zero_stage else ()
    return (*gathers, "pp_odd") if grid.pp > 2 else gathers
