"""The settings of a DeepSpeed JSON that no field of the tree has; `megazero.initialize` reads them.

Defaults are DeepSpeed's.
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
        params: the arguments of its class, without those that are null, and without most that are "auto".
    """

    type: str
    params: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RankExtras:
    """The layout of ranks.

    Attributes:
        sequence_parallel_size: ranks that share a sequence.
        data_parallel_size: data-parallel ranks, if the JSON says more than one.
        seq_parallel_communication_data_type: the type in which gradients are reduced where ranks share
            sequences; None for the type that is used without sharing.
    """

    sequence_parallel_size: int = 1
    data_parallel_size: int | None = None
    seq_parallel_communication_data_type: str | None = None


@dataclass(frozen=True)
class CheckpointExtras:
    """The section `checkpoint`.

    Attributes:
        tag_validation: what happens if ranks save under different tags.
        use_node_local_storage: whether each node writes to a folder that the others do not see.
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
        gradient_predivide_factor: without `prescale_gradients`, divide by this factor before the sum, and by
            the number of ranks over this factor after it.
        dataloader_drop_last: leave out the last batch if it is short.
        zero_allow_untested_optimizer: no effect; ZeRO here takes any optimizer.
        gather_16bit_weights_on_save: write whole weights in the model's type beside a checkpoint.
        dump_state: print the configuration at start.
        consecutive_hysteresis: restore the number of tolerated overflows at every step without one.
        managed_gradient_accumulation: count micro-batches; without it, every step updates.
        ranks: the layout of ranks.
        checkpoint: the section `checkpoint`.
        sections: the content of sections that are read elsewhere, as the JSON has it, such as
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
    def of(cls, values: Mapping[str, object]) -> Extras:
        """Build it from attribute paths such as `checkpoint.tag_validation`."""
        groups: dict[str, dict[str, Any]] = {"ranks": {}, "checkpoint": {}, "sections": {}}
        plain: dict[str, Any] = {}
        for path, value in values.items():
            group, _, name = path.rpartition(".")
            (groups[group] if group else plain)[name] = value
        ranks, checkpoint = RankExtras(**groups["ranks"]), CheckpointExtras(**groups["checkpoint"])
        return cls(**plain, ranks=ranks, checkpoint=checkpoint, sections=groups["sections"])
