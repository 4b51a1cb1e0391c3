"""The random generators that other code may draw from: Python's, numpy's and torch's.

megazero's own randomness comes from stateless streams, so none of its results depend on these generators, but
a user's dataset or monitor may use them."""

from __future__ import annotations

import random
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from megazero.checkpoint import FP8, ROUTER, Key, Part, Source
from megazero.errors import DamagedCheckpointError
from megazero.layers import Fp8State
from megazero.moe import RouterLoads
from megazero.mpu import ParallelContext


def random_state(device: torch.device) -> dict[str, Tensor]:
    """The state of each generator of this process, as tensors of fixed shape."""
    _, words, gauss = random.getstate()
    state = np.random.get_state()
    assert isinstance(state, tuple), "of the legacy generator"
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
    """Put each generator of this process into a state that `random_state` gave.

    Raises:
        DamagedCheckpointError: a generator cannot have such a state.
    """
    try:
        _set(state, device)
    except (ValueError, OverflowError, RuntimeError) as error:
        raise DamagedCheckpointError(
            f"the random state must be one that a generator can have, but is not: {error}; set --no-load-rng"
        ) from error


def _set(state: Mapping[str, Tensor], device: torch.device) -> None:
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


def router_parts_to_write(loads: RouterLoads, context: ParallelContext) -> list[Part]:
    """The loads and biases of the routers here, which the first rank of each stage writes."""
    if context.groups["stage"].rank:
        return []
    return [Part.whole(Key(name, ROUTER), tensor) for name, tensor in loads.state().items()]


def router_parts_to_read(loads: RouterLoads, source: Source) -> list[Part]:
    """The loads and biases that the source has. Converted models have none: their routers begin evenly."""
    tensors = {Key(name, ROUTER): tensor for name, tensor in loads.state().items()}
    return [Part.whole(key, tensor) for key, tensor in tensors.items() if key in source.shapes]


def fp8_parts_to_write(fp8: Fp8State, context: ParallelContext) -> list[Part]:
    """The histories and scales of the layers here, which the first rank of each stage writes."""
    if context.groups["stage"].rank:
        return []
    return [Part.whole(Key(name, FP8), tensor) for name, tensor in fp8.state().items()]


def fp8_parts_to_read(fp8: Fp8State, source: Source) -> list[Part]:
    """The histories and scales that the source has in the same shape; one of another length begins anew."""
    tensors = {Key(name, FP8): tensor for name, tensor in fp8.state().items()}
    return [
        Part.whole(key, tensor) for key, tensor in tensors.items() if source.shapes.get(key) == tensor.shape
    ]
