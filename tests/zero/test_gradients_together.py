"""Gradients that wait to be added together on a GPU: the same sums as if each were added at once."""

from __future__ import annotations

import pytest

from benchmarks.launches import as_on_cuda
from megazero.kernels.on_cpu import WatchedLibrary
from megazero.mpu.context import solo_context
from megazero.verify.record import record_training
from megazero.zero import fill
from tests.kernels.harness import library_path, same_bits
from tests.layouts.layout import Layout

LAYOUTS = [
    {},
    {"zero": 2, "dtype": "bf16", "micro_batch": 2},
    {"shape": "llama", "zero": 3, "recompute": "full"},
    {"schedule": "zb-h1", "untied": True},
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("most", [None, 0, 3000])
def test_sums_have_the_bits_of_sums_at_once(monkeypatch, layout, most):
    """However many bytes may wait, and over several micro-batches."""
    library = WatchedLibrary(library_path())
    library.reset()
    with as_on_cuda(library):
        if most is not None:
            monkeypatch.setattr(fill, "_MOST_WAITING", most)
        together = record_training(Layout(**layout).config(), solo_context(), 2)
        assert library.report().kernels["gradient_sum"].launches
        monkeypatch.setattr(fill, "adds_together", lambda device: False)
        at_once = record_training(Layout(**layout).config(), solo_context(), 2)
    assert together.losses == at_once.losses
    for ours, theirs in zip(
        together.gradients + together.weights, at_once.gradients + at_once.weights, strict=True
    ):
        assert ours.keys() == theirs.keys()
        for name, tensor in ours.items():
            assert same_bits(tensor, theirs[name]), name
