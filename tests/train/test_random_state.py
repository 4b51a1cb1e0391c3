"""Generators continue where they were saved, the second number of a normal pair included."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from megazero.train.resume.keepers import random_state, set_random_state

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _generators_as_before():
    before = random_state(CPU)
    yield
    set_random_state(before, CPU)


def draws() -> list[float]:
    return [
        random.gauss(0, 1),
        random.random(),
        float(np.random.randn()),
        float(np.random.rand()),
        *torch.randn(3).tolist(),
    ]


@pytest.mark.parametrize("earlier", range(3))
def test_the_next_draws_are_the_same(earlier):
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    for _ in range(earlier):  # Python and numpy make normal numbers by twos: after one, the other is waiting
        random.gauss(0, 1)
        np.random.randn()
        torch.randn(())
    assert (random.getstate()[2] is not None) == (np.random.get_state()[3] == 1) == (earlier % 2 == 1)
    state = random_state(CPU)
    want = draws()
    assert draws() != want, "the generators have moved on"
    set_random_state(state, CPU)
    assert draws() == want


def test_states_are_tensors_of_fixed_shapes():
    # A row of each goes into a tensor over all ranks, so that shapes must not depend on what was drawn.
    def shapes():
        return {name: (tensor.dtype, tensor.shape) for name, tensor in random_state(CPU).items()}

    random.seed(1)
    np.random.seed(1)
    before = shapes()
    random.gauss(0, 1)
    np.random.randn()
    assert shapes() == before
    assert before.keys() == {"python", "python_gauss", "numpy", "numpy_gauss", "torch"}


def test_a_state_stays_what_it_was():
    random.seed(3)
    np.random.seed(3)
    torch.manual_seed(3)
    state = random_state(CPU)
    kept = {name: tensor.clone() for name, tensor in state.items()}
    draws()
    assert all(kept[name].equal(tensor) for name, tensor in state.items())


def test_a_waiting_zero_is_waiting():
    # The pair's second number may be 0.0, which is not the same as none.
    version, words, _ = random.getstate()
    random.setstate((version, words, 0.0))
    state = random_state(CPU)
    random.setstate((version, words, None))
    set_random_state(state, CPU)
    assert random.getstate()[2] == 0.0
