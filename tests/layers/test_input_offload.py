"""Inputs on the host: their way there and back, one unit ahead, and the memory that takes."""

from __future__ import annotations

import pytest
import torch

from megazero.layers.input_offload import AwayInput, Pass, Shelf
from tests.layers.test_recompute import Stack, full, on_ranks
from tests.streams.recorder import Recorder, RecordingStreams
from tests.streams.recording import recorded_context, recordings


class Noted(RecordingStreams):
    """Notes which way each copy goes."""

    def __init__(self, recorder: Recorder):
        super().__init__(recorder)
        self.ways = ""

    def copy(self, target, source):
        self.ways += "v" if self.recorder.is_host(target) else "^"
        return super().copy(target, source)


def test_inputs_go_as_they_are_used_and_come_back_one_ahead():
    streams = Noted(recorder := Recorder())
    with recorder.on_thread():
        shelf, inputs = Shelf(streams), [torch.full((4,), float(n)) for n in range(3)]
        sent = Pass(shelf)
        away = [sent.send(x) for x in inputs]
        sent.end()
        assert streams.ways == "vvv"
        assert away[2].take().tolist() == [2.0] * 4
        assert streams.ways == "vvv^^"  # with the one before
        assert away[1].take().tolist() == [1.0] * 4
        assert streams.ways == "vvv^^^"
        assert away[0].take().tolist() == [0.0] * 4
        assert streams.ways == "vvv^^^"
        del away, sent
        assert len(shelf._free) == 3
        again = AwayInput(inputs[1], shelf, None)
        assert len(shelf._free) == 2
        assert again.take().tolist() == [1.0] * 4
    assert recorder.order.races == {}


@pytest.mark.parametrize("dims", [(0, 1, 2), (1, 0, 2), (2, 1, 0)])
def test_an_input_comes_back_with_its_strides(dims):
    """Another product may be taken of the same numbers in another order, and round otherwise."""
    x = torch.arange(24.0).view(2, 3, 4).permute(dims)
    recorder = Recorder()
    with recorder.on_thread():
        back = AwayInput(x, Shelf(RecordingStreams(recorder)), None).take()
    assert back.stride() == x.stride()
    assert torch.equal(back, x)


def test_memory_too_small_is_given_up():
    recorder = Recorder()
    shelf = Shelf(RecordingStreams(recorder))
    for size, free in ((4, [16]), (2, [16]), (8, [32]), (8, [32])):
        AwayInput(torch.ones(size), shelf, None)
        assert [memory.nbytes for memory in shelf._free] == free


@pytest.mark.parametrize("tp", [1, 2])
def test_gradients_are_the_same_bits(tp):
    def gradients(context, recompute):
        recorder = Recorder()
        with recorder.on_thread():
            made = Stack(recorded_context(context, recorder), recompute).gradients()
        assert recorder.order.races == {}
        return made

    settings = full(offload=True, partition_activations=tp > 1)
    with recordings():
        offloaded = on_ranks(tp, lambda context: gradients(context, settings))
        expected = on_ranks(tp, lambda context: gradients(context, full()))
    for one, other in zip(offloaded, expected, strict=True):
        assert all(map(torch.equal, one, other))
