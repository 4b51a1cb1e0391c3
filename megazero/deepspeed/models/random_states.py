"""Named streams of torch's random numbers, as Megatron's and DeepSpeed's scripts use them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from megazero.deepspeed.utils.per_context import PerContext
from megazero.errors import ConfigError

MODEL_PARALLEL = "model-parallel-rng"
OFFSET = 2718
"""The offset of the seed for the stream that differs between tensor-parallel ranks."""


class RandomStates:
    """Named states of torch's generator on the current CUDA device, or on the CPU without CUDA.

    Within `fork`, random numbers come from a named state, which continues where it stopped.
    """

    def __init__(self) -> None:
        self._states: dict[str, Tensor] = {}
        self._seeds: set[int] = set()

    def reset(self) -> None:
        """Remove all states."""
        self._states, self._seeds = {}, set()

    def get_states(self) -> dict[str, Tensor]:
        """Return a copy of the states by name."""
        return dict(self._states)

    def set_states(self, states: Mapping[str, Tensor]) -> None:
        """Restore what `get_states` returned."""
        self._states = dict(states)

    def add(self, name: str, seed: int) -> None:
        """Start a stream.

        Raises:
            ConfigError: the name or the seed is taken.
        """
        if name in self._states or seed in self._seeds:
            raise ConfigError(
                f"`{name}` must be a new stream with a seed of its own, but its name or the seed {seed} is "
                "taken; call `reset` first or choose another"
            )
        self._seeds.add(seed)
        before = _get_state()
        _seed(seed)
        self._states[name] = _get_state()
        _set_state(before)

    @contextmanager
    def fork(self, name: str = MODEL_PARALLEL) -> Iterator[None]:
        """Draw random numbers from a stream within this context.

        Raises:
            ConfigError: the stream does not exist.
        """
        if name not in self._states:
            raise ConfigError(
                f"`{name}` must be a stream that `add` began, but is none of "
                f"{', '.join(self._states) or 'no streams'}; call `model_parallel_cuda_manual_seed` first"
            )
        before = _get_state()
        _set_state(self._states[name])
        try:
            yield
        finally:
            self._states[name] = _get_state()
            _set_state(before)


_TRACKER: PerContext[RandomStates] = PerContext("random_states")


def get_cuda_rng_tracker() -> RandomStates:
    """Return the streams of this rank."""
    tracker = _TRACKER.get()
    if tracker is None:
        tracker = RandomStates()
        _TRACKER.set(tracker)
    return tracker


def seed_streams(seed: int, rank: int, *, default: bool = True) -> None:
    """Seed torch (if `default`) with `seed`, and the tensor-parallel stream with a seed for `rank`."""
    tracker = get_cuda_rng_tracker()
    tracker.reset()
    if default:
        _seed(seed)
    tracker.add(MODEL_PARALLEL, seed + OFFSET + rank)


def _seed(seed: int) -> None:
    if torch.cuda.is_available():
        torch.cuda.manual_seed(seed)
    else:
        torch.manual_seed(seed)


def _get_state() -> Tensor:
    return torch.cuda.get_rng_state() if torch.cuda.is_available() else torch.get_rng_state()


def _set_state(state: Tensor) -> None:
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(state)
    else:
        torch.set_rng_state(state)
