"""The section `offload`: state that is kept in the host's memory or on disk."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from megazero.config.condition import config, here, when
from megazero.config.tree.optimizer import ELEMENTWISE_NAMES
from megazero.config.tree.option import Section, option
from megazero.config.tree.roles import Role

Fraction = Annotated[float, Field(ge=0, le=1)]
"""A fraction from 0 to 1, both included."""


class OffloadConfig(Section):
    """Offload"""

    optimizer: Literal["none", "cpu", "nvme"] = option(
        "none",
        flag="--offload-optimizer",
        switches={"--optimizer-cpu-offload": "cpu", "--cpu-optimizer": "cpu"},
        needs=when("nvme", here.path),
    )
    """where masters and moments are kept and updated: on the device, in the host's memory (ZeRO-Offload), or
    on disk, from where they visit the host's memory (ZeRO-Infinity)"""
    gradients: Literal["auto", "none", "cpu", "nvme"] = option(
        "auto",
        flag="--offload-gradients",
        needs=(when(("cpu", "nvme"), here.optimizer), when("nvme", here.path)),
    )
    """where gradient sums are kept once they are complete; auto is where masters and moments are"""
    parameters: Literal["none", "cpu", "nvme"] = option(
        "none",
        flag="--offload-parameters",
        aliases=("--remote-device",),
        needs=((config.zero.stage == 3).because("it shards them"), when("nvme", here.path)),
    )
    """stage 3: where each rank keeps its slices of the weights between gathers"""
    fraction: Fraction = option(
        1.0, flag="--offload-fraction", aliases=("--optimizer-offload-fraction",), needs=here.optimizer
    )
    """share of the elements whose masters and moments are offloaded, in whole buckets; the others stay on the
    device and are updated there (twin-flow)"""
    delayed_param_update: bool = option(
        False,
        flag="--delayed-param-update",
        needs=(
            (here.optimizer == "cpu").because(
                "on the device an update would take turns with the step beside it"
            ),
            here.gradients.among("auto", "cpu").because(
                "on the device the step beside an update would overwrite its sums"
            ),
            (here.fraction == 1.0).because(
                "on the device an update would take turns with the step beside it"
            ),
            (here.parameters == "none").because("a step reads the slices that the update beside it replaces"),
            config.optimizer.optimizer.among(*ELEMENTWISE_NAMES).because(
                "others send messages in an update, which would cross those of the step beside it"
            ),
            (config.zero.quantized_weights == "none").because(
                "weights in use are saved, and rounded ones have other codes"
            ),
            config.finetune.task.is_none.because(
                "the best weights are in use, and masters are one update ahead of them"
            ),
        ),
    )
    """update on the host while the next step computes with the weights of the step before, which changes the
    numbers of the training (DPU of ZeRO-Offload)"""
    delayed_param_update_start: NonNegativeInt = option(
        40, flag="--delayed-param-update-start", unit="updates", needs=here.delayed_param_update
    )
    """updates that are made at once before they are delayed, while weights change fast"""
    path: str | None = option(None, roles=Role.OUTPUT, flag="--offload-path")
    """folder on the disk to offload to; nothing is left there at the end"""
    block_size: PositiveInt = option(8 << 20, flag="--offload-block-size", unit="bytes")
    """size of a read or write"""
    queue_depth: Annotated[int, Field(ge=1, le=256)] = option(4, flag="--offload-queue-depth")
    """reads and writes under way at a time, per rank"""
    direct_io: bool = option(True, flag="--no-offload-direct-io")
    """read and write through the system's page cache, which then takes memory"""
    pin_memory: bool = option(
        True, flag="--no-offload-pin-memory", aliases=("--no-pin-cpu-grads", "--no-pin-cpu-params")
    )
    """leave the host's memory unpinned, which CUDA reads and writes more slowly"""

    @property
    def places(self) -> tuple[str, str, str]:
        """The places of masters and moments, of gradient sums, and of slices of weights."""
        gradients = self.optimizer if self.gradients == "auto" else self.gradients
        return self.optimizer, gradients, self.parameters
