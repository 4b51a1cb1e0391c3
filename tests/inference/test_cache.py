"""The key-value cache: lazily allocated, one length per layer, never overrun."""

from __future__ import annotations

import pytest
import torch

from megazero.errors import ConfigError
from megazero.inference.cache import KeyValueCache
from megazero.layers.inputs import Attends


def ramp(start: int, s: int) -> torch.Tensor:
    """[s, 2, 1, 3] whose entries tell their position."""
    return torch.arange(start, start + s).view(s, 1, 1, 1).expand(s, 2, 1, 3).double()


def test_positions_are_appended_layer_by_layer():
    cache = KeyValueCache(5)
    assert cache.length == 0
    for start, s in ((0, 2), (2, 1), (3, 2)):
        for layer in (0, 7):
            keys, values = cache.extend(Attends(layer, True), ramp(start, s), -ramp(start, s))
            assert torch.equal(keys, ramp(0, start + s))
            assert torch.equal(values, -ramp(0, start + s))
        assert cache.length == start + s


def test_length_is_what_every_layer_holds():
    cache = KeyValueCache(4)
    cache.extend(Attends(0, True), ramp(0, 1), ramp(0, 1))
    cache.extend(Attends(1, True), ramp(0, 1), ramp(0, 1))
    cache.extend(Attends(0, True), ramp(1, 2), ramp(1, 2))
    assert cache.length == 1


def test_memory_is_kept_and_takes_the_dtype_of_what_comes():
    cache = KeyValueCache(4)
    first, _ = cache.extend(Attends(0, True), ramp(0, 1).bfloat16(), ramp(0, 1).bfloat16())
    second, _ = cache.extend(Attends(0, True), ramp(1, 3).bfloat16(), ramp(1, 3).bfloat16())
    assert second.dtype == torch.bfloat16
    assert first.data_ptr() == second.data_ptr()


def test_an_overrun_is_refused_and_changes_nothing():
    cache = KeyValueCache(3)
    cache.extend(Attends(0, True), ramp(0, 2), ramp(0, 2))
    with pytest.raises(ConfigError, match=r"`max_length` .* must be at least 4, but is 3"):
        cache.extend(Attends(0, True), ramp(2, 2), ramp(2, 2))
    assert cache.length == 2
