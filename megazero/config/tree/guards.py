"""The section `guards`: the checks that a run makes on itself, and what it does about faults."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, NonNegativeInt, PositiveFloat, PositiveInt

from megazero.config.condition import config, when
from megazero.config.tree.option import Section, option

_FEWEST, _MOST = 20, 10_000


def _window(updates: int) -> int:
    if not _FEWEST <= updates <= _MOST:
        raise ValueError(
            f"must be from {_FEWEST}, the fewest updates whose median says what is usual, to {_MOST}"
        )
    return updates


SpikeWindow = Annotated[int, AfterValidator(_window)]
"""Updates that a running median is taken of: enough for a median, and few enough to be saved."""


class GuardsConfig(Section):
    """Guards"""

    max_skipped_updates: PositiveInt | None = option(None)
    """end with an error once this many updates in a row are skipped because a gradient is inf or NaN;
    default: 5 in fp32 and bf16, and in fp16 as many as its loss scale has use for"""
    check_weights_interval: NonNegativeInt = option(
        500, aliases=("--check-weight-hash-across-dp-replicas-interval",), unit="iterations"
    )
    """steps between comparisons of the copies that ranks hold of weights, masters and moments; they are also
    compared before each checkpoint; 0 turns it off"""
    on_weights_differ: Literal["stop", "majority", "checkpoint"] = option(
        "stop",
        needs=(
            when("checkpoint", config.checkpoint.save),
            when("checkpoint", config.checkpoint.save_interval),
            when("checkpoint", config.checkpoint.no_save_optim.is_off),
        ),
    )
    """what to do when copies differ: end with an error; take over what most ranks hold; or go back to the
    last healthy checkpoint"""
    on_spike: Literal["off", "warn", "skip", "rollback"] = option(
        "warn",
        needs=(
            when("rollback", config.checkpoint.save),
            when("rollback", config.checkpoint.save_interval),
            when("rollback", config.checkpoint.no_save_optim.is_off),
        ),
    )
    """what to do about a step whose loss or gradient norm is far above the latest ones: report it; leave its
    update out; or go back to the last healthy checkpoint and train without its samples"""
    spike_threshold: PositiveFloat = option(10.0)
    """how far above the median of the latest updates a spike is, in robust standard deviations"""
    spike_window: SpikeWindow = option(
        128,
        f"updates that the median is taken of, from {_FEWEST} to {_MOST}; a run looks for spikes once it has "
        f"made {_FEWEST}",
        unit="updates",
    )
    spike_steps: PositiveInt = option(2)
    """steps whose samples `--on-spike rollback` sets aside: the spike's and those before it"""
    max_rollbacks: PositiveInt = option(3)
    """end with an error after this many rollbacks to one checkpoint"""
    rerun_on_fault: bool = option(False)
    """compute a step with a spike, inf or NaN again, on the same and on another rank: a result that differs
    is the fault of a machine, which is named"""
    check_host_waits: Literal["off", "warn", "error"] = option(
        "off",
        needs=(config.acceleration.compile.is_off | (config.parallel.device == "cuda")).because(
            "a CPU's waits are found at each operator"
        ),
    )
    """look for calls within steps that make the host wait for the device, from the second step on: report
    each place once, or end with an error; slow on a CPU"""
    iterations_to_skip: tuple[NonNegativeInt, ...] = option(())
    """pass over the samples of the step that follows after so many steps, as in Megatron-LM: 500 is iteration
    501"""
