"""The launches of a layer on a GPU, counted on the CPU: by mistake they only become more."""

from __future__ import annotations

import pytest

from benchmarks.launches import Case, per_layer, waits

FORWARD = {
    "addmm": 4,
    "bias_dropout_add_forward": 1,
    "bias_gelu_forward": 1,
    "layer_norm_forward": 2,
    "neg": 1,  # attention
}
BACKWARD = {
    "bias_dropout_add_backward": 1,  # without dropout, the sum of the MLP's second bias alone
    "bias_gelu_backward": 1,
    "cat": 1,  # of the gradients of queries, keys and values
    "layer_norm_backward": 2,
    "mm": 8,
    "neg": 1,
    "sum": 1,  # of the bias of queries, keys and values
}


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_launches_of_a_layer(dtype, micro_batches):
    """Nothing is cast, and gradients of many layers reach their sums in one launch."""
    forward, backward, _ = per_layer(Case(dtype, micro_batches=micro_batches))
    assert forward == FORWARD
    assert backward == BACKWARD


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_launches_of_a_layer_with_dropout(dtype):
    """Keys cost none: they are derived where they are used. Once they were 82 of 96."""
    forward, backward, _ = per_layer(Case(dtype, dropout=0.1))
    assert forward == FORWARD | {"bias_dropout_add_forward": 2}
    assert backward == BACKWARD | {"bias_dropout_add_backward": 2}


def test_the_host_waits_once_a_step():
    """For losses and norm together, while the update runs."""
    assert waits(Case()) == 1
