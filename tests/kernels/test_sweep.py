"""The kernels of every differentiable operator against the formulas in fp64: widths, strides, nothing."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.harness import DTYPES
from tests.kernels.sweep import TRIALS, check, check_nothing, gradients_for, twisted, with_inputs
from tests.tables import over_table

OPERATORS = over_table("name", TRIALS)


@OPERATORS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_width(name, dtype):
    make, widths = TRIALS[name]
    for width in widths:
        check(make(1 + width % 3 if width < 70 else 1, width, dtype))


@OPERATORS
@over_table("dtype", DTYPES, ids=str)
def test_any_strides_and_addresses(name, dtype):
    trial = TRIALS[name][0](5 if name not in ("gathered_sum", "permute", "chosen_rows") else 1, 48, dtype)
    grads = gradients_for(trial)
    for turn in (0, 1):
        # Two extra tensors in front change whose turn it is.
        apart = [torch.zeros(1)] * turn
        inputs = twisted([*apart, *trial.inputs])[turn:]
        check(with_inputs(trial, *inputs), twisted([*[torch.zeros(1)] * (1 - turn), *grads])[1 - turn :])


@OPERATORS
@over_table(("rows", "width"), [(0, 8), (3, 0)])
def test_nothing_gives_nothing(name, rows, width):
    if (name, width) == ("cross_entropy", 0):
        pytest.skip("a softmax of no columns is not defined")
    trial = TRIALS[name][0](rows, width, torch.float32)
    if not trial.inputs[0].numel():
        check_nothing(trial)
