"""The key-value cache: lazily allocated, one length per layer, never overrun."""

from __future__ import annotations

import pytest
import torch

from megazero.errors import ConfigError
from megazero.inference.cache import KeyValueCache
from megazero.layers.inputs import Attends
from megazero.ops.attention import BlockLayout, Pattern


def ramp(start: int, s: int) -> torch.Tensor:
    """[s, 2, 1, 3] whose entries tell their position."""
    return torch.arange(start, start + s).view(s, 1, 1, 1).expand(s, 2, 1, 3).double()


def test_positions_are_appended_layer_by_layer():
    cache = KeyValueCache(5)
    for start, s in ((0, 2), (2, 1), (3, 2)):
        for layer in (0, 7):
            keys, values = cache.extend(Attends(layer, True), ramp(start, s), -ramp(start, s))
            assert torch.equal(keys, ramp(0, start + s))
            assert torch.equal(values, -ramp(0, start + s))


def test_each_layer_has_a_length_of_its_own():
    cache = KeyValueCache(4)
    cache.extend(Attends(0, True), ramp(0, 1), ramp(0, 1))
    cache.extend(Attends(1, True), ramp(0, 1), ramp(0, 1))
    assert torch.equal(cache.extend(Attends(0, True), ramp(1, 2), ramp(1, 2))[0], ramp(0, 3))
    assert torch.equal(cache.extend(Attends(1, True), ramp(1, 1), ramp(1, 1))[0], ramp(0, 2))


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
    assert torch.equal(cache.extend(Attends(0, True), ramp(2, 1), ramp(2, 1))[0], ramp(0, 3))


def test_a_window_keeps_what_later_positions_may_attend_to():
    """And the first ones that no window hides; memory stops growing, unlike without a window."""
    cache = KeyValueCache(40)
    near = Attends(0, True, pattern=Pattern((3, 0), sinks=2))
    assert cache.extend(near, ramp(0, 7), -ramp(0, 7))[0][:, 0, 0, 0].tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert cache.extend(near, ramp(7, 1), -ramp(7, 1))[0][:, 0, 0, 0].tolist() == [0, 1, 4, 5, 6, 7]
    keys, values = cache.extend(near, ramp(8, 2), -ramp(8, 2))
    assert keys[:, 0, 0, 0].tolist() == [0, 1, 5, 6, 7, 8, 9]
    assert torch.equal(values, -keys)
    size = cache.bytes
    for start in range(10, 40):
        cache.extend(near, ramp(start, 1), ramp(start, 1))
        assert cache.bytes == size == 2 * 5 * 2 * 3 * 8
    with pytest.raises(ConfigError, match="must be at least 41"):
        cache.extend(near, ramp(40, 1), ramp(40, 1))
    cache.extend(Attends(1, True), ramp(0, 1), ramp(0, 1))
    assert cache.bytes == size + 2 * 40 * 2 * 3 * 8


def test_a_long_prompt_is_not_kept_by_a_view_of_its_end():
    cache = KeyValueCache(1000)
    cache.extend(Attends(0, True, pattern=Pattern((4, 0))), ramp(0, 1000), ramp(0, 1000))
    assert [x.untyped_storage().nbytes() for x in cache._windows[0]] == [4 * 2 * 3 * 8] * 2


def test_nothing_is_dropped_where_places_matter():
    cache = KeyValueCache(9)
    layout = BlockLayout(torch.ones(1, 3, 3, dtype=torch.bool), 3)
    for layer, pattern in enumerate((Pattern((2, 0), prefix=4), Pattern((2, 0), layout=layout), Pattern())):
        for start in range(9):
            keys, _ = cache.extend(Attends(layer, True, pattern=pattern), ramp(start, 1), ramp(start, 1))
            assert torch.equal(keys, ramp(0, start + 1))
