"""The settings of a DeepSpeed JSON for an engine that is given its model; `megazero.initialize` reads it.

The settings of training itself are fields of the tree; these are the rest. Defaults are DeepSpeed's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Named:
    """An optimizer or a schedule that the JSON names.

    Attributes:
        type: its name.
        params: the arguments of its class; those that are null are left out, and so are most that are
            "auto".
    """

    type: str
    params: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RankExtras:
    """Ranks that share sequences.

    Attributes:
        sequence_parallel_size: how many share a sequence.
        data_parallel_size: ranks with samples of their own, if the JSON says more than one.
        seq_parallel_communication_data_type: the type of gradients on their way between ranks, some of which
            share sequences; None: as for others.
    """

    sequence_parallel_size: int = 1
    data_parallel_size: int | None = None
    seq_parallel_communication_data_type: str | None = None


@dataclass(frozen=True)
class CheckpointExtras:
    """The section `checkpoint`.

    Attributes:
        tag_validation: what happens if ranks save under different tags.
        use_node_local_storage: each node has a folder of its own, which the others do not see.
    """

    tag_validation: Literal["warn", "ignore", "fail"] = "warn"
    use_node_local_storage: bool = False


@dataclass(frozen=True)
class Extras:
    """Everything that the JSON says beyond the tree.

    Attributes:
        optimizer: what to build if the caller passes no optimizer; with None the caller must pass one.
        scheduler: the learning rate schedule to build; None for the caller's, or a constant rate.
        steps_per_print: optimizer steps between log lines.
        auto_cast: cast floating point inputs of the model to its type.
        prescale_gradients: divide gradients by the number of ranks before they are summed, not after.
        gradient_predivide_factor: without `prescale_gradients`, divide by this before the sum and by the
    rest after it.
        dataloader_drop_last: leave out the last batch if it is short.
        zero_allow_untested_optimizer: not asked; each optimizer runs on pieces or whole parameters.
        gather_16bit_weights_on_save: write whole weights in the model's type beside a checkpoint.
        dump_state: print the configuration at start.
        consecutive_hysteresis: every step without an overflow gives the tolerated overflows back.
        managed_gradient_accumulation: count micro-batches; without it, every step updates.
        ranks: how ranks are laid out.
        checkpoint: how checkpoints are written.
        sections: the content of sections that are read elsewhere, as it stands in the JSON: for example
            `tensor_parallel`.
    """

    optimizer: Named | None = None
    scheduler: Named | None = None
    steps_per_print: int = 10
    auto_cast: bool = False
    prescale_gradients: bool = False
    gradient_predivide_factor: float = 1.0
    dataloader_drop_last: bool = False
    zero_allow_untested_optimizer: bool = False
    gather_16bit_weights_on_save: bool = False
    dump_state: bool = False
    consecutive_hysteresis: bool = False
    managed_gradient_accumulation: bool = True
    ranks: RankExtras = RankExtras()
    checkpoint: CheckpointExtras = CheckpointExtras()
    sections: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Extras:
        """Build it from attribute paths such as `checkpoint.tag_validation`."""
        groups: dict[str, dict[str, Any]] = {"ranks": {}, "checkpoint": {}, "sections": {}}
        plain: dict[str, Any] = {}
        for path, value in values.items():
            group, _, name = path.rpartition(".")
            (groups[group] if group else plain)[name] = value
        ranks, checkpoint = RankExtras(**groups["ranks"]), CheckpointExtras(**groups["checkpoint"])
        return cls(**plain, ranks=ranks, checkpoint=checkpoint, sections=groups["sections"])
