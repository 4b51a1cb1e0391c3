from __future__ import annotations

import os
import pickle

import numpy as np
import pytest

from megazero.data_tools.preprocessing.slots import Parcel, SharedSlots

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="the memory is shared by a fork")


def _value(start: int, size: int) -> dict:
    return {"name": "chunk", "tokens": np.arange(start, start + size, dtype=np.uint16), "lengths": None}


@pytest.mark.parametrize("size", [0, 1, 1000])
def test_a_value_arrives_whole_and_its_arrays_do_not_travel(size):
    slots = SharedSlots(2, 4096)
    parcel = slots.pack([_value(0, size), _value(7, size)])
    assert isinstance(parcel, Parcel)
    assert len(pickle.dumps(parcel)) < 1000
    first, second = slots.unpack(parcel)
    assert first["name"] == "chunk"
    assert first["lengths"] is None
    assert first["tokens"].dtype == np.uint16
    assert first["tokens"].tolist() == list(range(size))
    assert second["tokens"].tolist() == list(range(7, 7 + size))


def test_what_does_not_fit_is_left_as_it_is():
    slots = SharedSlots(1, 4096)
    big = _value(0, 2049)
    assert slots.pack(big) is big
    assert slots.unpack(big) is big
    assert slots.unpack(slots.pack(_value(3, 2048)))["tokens"][-1] == 2050


def test_a_value_holds_until_its_slot_comes_round():
    slots = SharedSlots(3, 64)
    values = [slots.unpack(slots.pack(_value(i, 4)))["tokens"] for i in range(3)]
    assert [value.tolist() for value in values] == [[0, 1, 2, 3], [1, 2, 3, 4], [2, 3, 4, 5]]
    slots.pack(_value(50, 4))
    assert [int(value[0]) for value in values] == [50, 1, 2]


def test_what_a_child_packs_its_parent_unpacks():
    slots = SharedSlots(1, 4096)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, pickle.dumps(slots.pack(_value(5, 3))))
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as pipe:
        assert slots.unpack(pickle.load(pipe))["tokens"].tolist() == [5, 6, 7]
    assert os.waitpid(child, 0)[1] == 0
