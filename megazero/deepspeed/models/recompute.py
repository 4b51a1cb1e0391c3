"""Activation checkpointing by DeepSpeed's names (``deepspeed.checkpointing``).

A checkpointed function's activations are dropped and computed again in backward (Chen et al. 2016); what it
starts from is kept whole, split over the tensor-parallel ranks, or in host memory. What `configure` chose
belongs to the thread of a rank, in a context variable, so that ranks that are threads do not share them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as recompute

from megazero.config.deepspeed.load import load_ds_config
from megazero.config.deepspeed.read import read_deepspeed
from megazero.deepspeed.comm.adopt import find_context
from megazero.deepspeed.config.settings import JsonSource
from megazero.deepspeed.models.random_states import get_cuda_rng_tracker, seed_streams
from megazero.deepspeed.utils.per_context import PerContext
from megazero.errors import ConfigError
from megazero.layers.recompute import InputKeeping
from megazero.mpu.group import Group


@dataclass(frozen=True)
class Settings:
    """The choices of `configure`.

    Attributes:
        group: the tensor-parallel ranks; None without an `mpu`.
        partition: whether inputs are split over them.
        in_cpu: whether inputs are kept in host memory.
        synchronize: whether the device is waited for around each function.
        profile: whether the time of each forward and backward is printed.
        num_layers: how many functions there are; only a note of the script.
        configured: whether `configure` was called.
    """

    group: Group | None = None
    partition: bool = False
    in_cpu: bool = False
    synchronize: bool = False
    profile: bool = False
    num_layers: int | None = None
    configured: bool = False


_CHOSEN: PerContext[Settings] = PerContext("activation_checkpointing")


def chosen_settings() -> Settings:
    """The choices of `configure` on this rank."""
    return _CHOSEN.get() or Settings()


def configure(
    mpu_: Any,
    deepspeed_config: JsonSource | None = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Choose what checkpointed functions keep; what is None is as the JSON says, and off without one.

    Args:
        mpu_: names the tensor-parallel ranks; see `find_context`. None splits nothing.
        deepspeed_config: a JSON whose section `activation_checkpointing` counts.
        partition_activations: split inputs over the tensor-parallel ranks, which must have equal ones.
        contiguous_checkpointing: has no effect: torch's allocator keeps memory together.
        num_checkpoints: how many functions a step has; needed for `contiguous_checkpointing`.
        checkpoint_in_cpu: keep inputs in host memory.
        synchronize: wait for the device before and after each function.
        profile: print the time of each forward and backward.

    Raises:
        ConfigError: the JSON is refused, or `contiguous_checkpointing` lacks what it needs.
    """
    before, section = chosen_settings(), _section(deepspeed_config)
    given = {
        "partition_activations": partition_activations,
        "contiguous_memory_optimization": contiguous_checkpointing,
        "number_checkpoints": num_checkpoints,
        "cpu_checkpointing": checkpoint_in_cpu,
        "synchronize_checkpoint_boundary": synchronize,
        "profile": profile,
    }
    chosen = {key: section.get(key) if value is None else value for key, value in given.items()}
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
    _CHOSEN.set(
        Settings(
            before.group if mpu_ is None else find_context(mpu_).tp,
            bool(chosen["partition_activations"]),
            bool(chosen["cpu_checkpointing"]),
            bool(chosen["synchronize_checkpoint_boundary"]),
            bool(chosen["profile"]),
            chosen["number_checkpoints"] or before.num_layers,
            configured=True,
        )
    )


def _section(config: JsonSource | None) -> Mapping[str, Any]:
    """A JSON's section on activation checkpointing."""
    if config is None:
        return {}
    read = read_deepspeed(config)
    if read.problems:
        raise ConfigError(read.problems)
    section: Mapping[str, Any] = load_ds_config(config).get("activation_checkpointing", {})
    return section


def is_configured() -> bool:
    """Whether `configure` was called on this rank."""
    return chosen_settings().configured


def reset() -> None:
    """Begin a step anew. There is nothing to forget: inputs are kept by the graph that needs them."""


def set_num_layers(nlayers: int) -> None:
    """Note how many functions a step has; nothing depends on it."""
    _CHOSEN.set(replace(chosen_settings(), num_layers=nlayers))


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Switch the splitting of inputs over tensor-parallel ranks on or off."""
    _CHOSEN.set(replace(chosen_settings(), partition=partition_activation))


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function whose activations are computed again in backward; returns what it returns.

    No input needs to require gradients. Random numbers are drawn again as they were, those of
    `get_cuda_rng_tracker` too.
    """
    settings = chosen_settings()
    keeping = _Keeping(settings.group if settings.partition else None, settings.in_cpu)
    runs = iter(("forward", "backward"))

    def run(*inputs: Any) -> Any:
        # All by position: torch has options of its own among the keywords.
        named = dict(zip(kwargs, inputs[len(args) :], strict=True))
        with _watched(settings, next(runs, "backward")):
            return function(*inputs[: len(args)], **named)

    with keeping.hooks():
        return recompute(run, *args, *kwargs.values(), use_reentrant=False, context_fn=_contexts)


def non_reentrant_checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """As `checkpoint`, which is not reentrant either."""
    return checkpoint(function, *args, **kwargs)


@dataclass(frozen=True)
class _Keeping(InputKeeping):
    """Keeps whole what cannot be split evenly, and what is no activation."""

    def _pack(self, x: Tensor) -> Any:
        split = self.partition is not None and x.numel() % self.partition.size == 0
        if isinstance(x, torch.nn.Parameter) or not x.is_floating_point():
            return x
        return split, (self if split else replace(self, partition=None))._packed(x)

    def _packed(self, x: Tensor) -> Any:
        return super()._pack(x)

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        split, kept = packed
        return InputKeeping._unpack(self if split else replace(self, partition=None), kept)


class _Replay:
    """Context in which the tracker draws again what it drew since this was made."""

    def __init__(self) -> None:
        self._tracker = get_cuda_rng_tracker()
        self._before = self._after = self._tracker.get_states()

    def __enter__(self) -> None:
        self._after = self._tracker.get_states()
        self._tracker.set_states(self._before)

    def __exit__(self, *error: object) -> None:
        self._tracker.set_states(self._after)


def _contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """The contexts of forward and of its repetition."""
    return nullcontext(), _Replay()


@contextmanager
def _watched(settings: Settings, phase: str) -> Iterator[None]:
    """Wait for the device around a call and print how long it took, where this is asked for."""
    waits = (settings.synchronize or settings.profile) and torch.cuda.is_available()
    if waits:
        torch.cuda.synchronize()
    began = time.perf_counter()
    try:
        yield
    finally:  # the repetition is left as soon as it has what backward needs
        if waits:
            torch.cuda.synchronize()
        if settings.profile:
            print(f"checkpointed {phase}: {1000 * (time.perf_counter() - began):.2f} ms", flush=True)


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed torch, and a stream of `get_cuda_rng_tracker` that differs between tensor-parallel ranks."""
    group = chosen_settings().group
    seed_streams(seed, 0 if group is None else group.rank)


def model_parallel_reconfigure_tp_seed(seed: int) -> None:
    """Seed the tracker's stream alone, anew."""
    group = chosen_settings().group
    seed_streams(seed, 0 if group is None else group.rank, default=False)
