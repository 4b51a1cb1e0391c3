"""Activation checkpointing by DeepSpeed's names (``deepspeed.checkpointing``).

The activations of a checkpointed function are dropped and recomputed in backward (Chen et al. 2016). Its
inputs are kept whole, partitioned over the tensor-parallel ranks, or in host memory. The settings of
`configure` are in a context variable, so that ranks that are threads have their own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as recompute

from megazero.config.deepspeed.load import load_ds_config
from megazero.config.deepspeed.read import read_deepspeed
from megazero.deepspeed.comm.adopt import find_context
from megazero.deepspeed.config import Json
from megazero.deepspeed.config.settings import JsonSource
from megazero.deepspeed.models.random_states import get_cuda_rng_tracker, seed_streams
from megazero.deepspeed.utils.per_context import PerContext
from megazero.errors import ConfigError
from megazero.layers.recompute import InputKeeping
from megazero.mpu.group import Group

_T = TypeVar("_T")


@dataclass(frozen=True)
class CheckpointingSettings:
    """The settings of `configure`.

    Attributes:
        group: the tensor-parallel ranks; None without an `mpu`.
        partition: whether inputs are partitioned over these ranks.
        in_cpu: whether inputs are kept in host memory.
        synchronize: whether to synchronize the device before and after each function.
        profile: whether to print the time of each forward and backward.
        num_layers: the number of checkpointed functions, as the script says; nothing depends on it.
        configured: whether `configure` was called.
    """

    group: Group | None = None
    partition: bool = False
    in_cpu: bool = False
    synchronize: bool = False
    profile: bool = False
    num_layers: int | None = None
    configured: bool = False


_SETTINGS: PerContext[CheckpointingSettings] = PerContext("activation_checkpointing")


def current_settings() -> CheckpointingSettings:
    """Return the settings of this rank."""
    return _SETTINGS.get() or CheckpointingSettings()


def configure(
    mpu_: object,
    deepspeed_config: JsonSource | None = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Set how inputs of checkpointed functions are kept; None takes the JSON's value, or else off.

    Args:
        mpu_: has the tensor-parallel ranks, see `find_context`; None keeps those of an earlier call.
        deepspeed_config: a JSON with a section `activation_checkpointing`.
        partition_activations: partition inputs over the tensor-parallel ranks, whose inputs must be equal.
        contiguous_checkpointing: has no effect, because torch's allocator avoids fragmentation.
        num_checkpoints: the number of functions in a step; needed for `contiguous_checkpointing`.
        checkpoint_in_cpu: keep inputs in host memory.
        synchronize: synchronize the device before and after each function.
        profile: print the time of each forward and backward.

    Raises:
        ConfigError: the JSON is wrong, or `contiguous_checkpointing` lacks an argument that it needs.
    """
    before, section = current_settings(), _section(deepspeed_config)
    arguments = {
        "partition_activations": partition_activations,
        "contiguous_memory_optimization": contiguous_checkpointing,
        "number_checkpoints": num_checkpoints,
        "cpu_checkpointing": checkpoint_in_cpu,
        "synchronize_checkpoint_boundary": synchronize,
        "profile": profile,
    }
    chosen = {key: section.get(key) if value is None else value for key, value in arguments.items()}
    if chosen["contiguous_memory_optimization"]:
        for key, name in (
            ("partition_activations", "partition_activations"),
            ("number_checkpoints", "num_checkpoints"),
        ):
            if not chosen[key] and not (name == "num_checkpoints" and before.num_layers):
                raise ConfigError(
                    f"`{name}` must be given for `contiguous_checkpointing`, but is {chosen[key]}; give it "
                    "or leave `contiguous_checkpointing` out, which has no effect here"
                )
    _SETTINGS.set(
        CheckpointingSettings(
            before.group if mpu_ is None else find_context(mpu_).tp,
            bool(chosen["partition_activations"]),
            bool(chosen["cpu_checkpointing"]),
            bool(chosen["synchronize_checkpoint_boundary"]),
            bool(chosen["profile"]),
            chosen["number_checkpoints"] or before.num_layers,
            configured=True,
        )
    )


def _section(config: JsonSource | None) -> Json:
    """Read the section `activation_checkpointing` of a JSON."""
    if config is None:
        return {}
    read = read_deepspeed(config)
    if read.problems:
        raise ConfigError(read.problems)
    section: Json = load_ds_config(config).get("activation_checkpointing", {})
    return section


def is_configured() -> bool:
    """Whether `configure` was called on this rank."""
    return current_settings().configured


def reset() -> None:
    """Do nothing: inputs belong to autograd's graph, so there is nothing to reset."""


def set_num_layers(nlayers: int) -> None:
    """Set the number of checkpointed functions; nothing depends on it."""
    _SETTINGS.set(replace(current_settings(), num_layers=nlayers))


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Switch partitioning of inputs over tensor-parallel ranks on or off."""
    _SETTINGS.set(replace(current_settings(), partition=partition_activation))


def checkpoint(function: Callable[..., _T], *args: object, **kwargs: object) -> _T:
    """Call a function, recompute its activations in backward, and return its result.

    Inputs need not require gradients. The recomputation repeats random numbers, including those of
    `get_cuda_rng_tracker`.
    """
    settings = current_settings()
    keeping = _CheckpointInputs(settings.group if settings.partition else None, settings.in_cpu)
    runs = iter(("forward", "backward"))

    def run(*inputs: object) -> _T:
        # All inputs are positional, because torch's `checkpoint` has keywords of its own.
        named = dict(zip(kwargs, inputs[len(args) :], strict=True))
        with _watched(settings, next(runs, "backward")):
            return function(*inputs[: len(args)], **named)

    with keeping.hooks():
        result: _T = recompute(
            run,
            *args,
            *kwargs.values(),
            use_reentrant=False,
            context_fn=lambda: (nullcontext(), _TrackerReplay()),
        )
    return result


non_reentrant_checkpoint = checkpoint


@dataclass(frozen=True)
class _CheckpointInputs(InputKeeping):
    """Keeps tensors whole that do not divide by the ranks, and parameters and integers as they are."""

    def _pack(self, x: Tensor) -> Any:
        if isinstance(x, torch.nn.Parameter) or not x.is_floating_point():
            return x
        split = self.partition is not None and x.numel() % self.partition.size == 0
        return split, InputKeeping._pack(self if split else replace(self, partition=None), x)

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        split, kept = packed
        return InputKeeping._unpack(self if split else replace(self, partition=None), kept)


class _TrackerReplay:
    """A context in which the tracker repeats the random numbers that it drew since construction."""

    def __init__(self) -> None:
        self._tracker = get_cuda_rng_tracker()
        self._before = self._after = self._tracker.get_states()

    def __enter__(self) -> None:
        self._after = self._tracker.get_states()
        self._tracker.set_states(self._before)

    def __exit__(self, *error: object) -> None:
        self._tracker.set_states(self._after)


@contextmanager
def _watched(settings: CheckpointingSettings, phase: str) -> Iterator[None]:
    """Synchronize the device around a call and print the time of the call, by the settings."""
    waits = (settings.synchronize or settings.profile) and torch.cuda.is_available()
    if waits:
        torch.cuda.synchronize()
    began = time.perf_counter()
    try:
        yield
    finally:  # torch stops the recomputation by an exception once backward has what it needs
        if waits:
            torch.cuda.synchronize()
        if settings.profile:
            print(f"checkpointed {phase}: {1000 * (time.perf_counter() - began):.2f} ms", flush=True)


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed torch, and the tracker's stream that differs between tensor-parallel ranks."""
    group = current_settings().group
    seed_streams(seed, 0 if group is None else group.rank)


def model_parallel_reconfigure_tp_seed(seed: int) -> None:
    """Seed only the tracker's stream."""
    group = current_settings().group
    seed_streams(seed, 0 if group is None else group.rank, default=False)
