"""The launches of a layer on a GPU, counted on the CPU: by mistake they only become more."""

from __future__ import annotations

import pytest
import torch

from benchmarks.launches import Case, StandIn, as_on_cuda, per_layer, waits
from megazero.layers.inputs import LayerInputs
from megazero.layers.rows import Rows
from megazero.mpu.rng import sample_keys
from tests.kernels.harness import assert_faultless, watched
from tests.layers.test_transformer import B, H, S, make_layer

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
    "stack": 1,  # of the gradients of queries, keys and values
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


@pytest.mark.parametrize("p", [0.0, 0.2])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"normalization": "RMSNorm", "activation": "gelu_exact"},
        {"use_parallel_residual": True},
        {"norm_position": "both"},
        {"residual_multiplier": 0.5},
        {"apply_residual_connection_post_layernorm": True},
        {"activation": "swiglu"},
    ],
    ids=str,
)
def test_kernels_make_the_gradients_that_a_cpu_makes(changes, p):
    """Of every parameter of a layer, whoever sums those of its biases."""
    keys = torch.from_numpy(sample_keys(1, range(B)))
    results = []
    for library in (None, watched()):
        layer = make_layer(hidden_dropout=p, **changes)
        layer.attention.core = lambda q, k, v, *_: StandIn.apply(q, k, v)
        x = torch.randn(S, B, H, generator=torch.Generator().manual_seed(1), requires_grad=True)
        leaves = [x, *layer.parameters()]

        def both_ways(layer=layer, x=x, leaves=leaves):
            out, _ = layer(x, LayerInputs(Rows(range(S), keys=keys)))
            return torch.autograd.grad(out, leaves, torch.cos(torch.arange(out.numel())).view_as(out))

        if library is None:
            results.append(both_ways())
            continue
        with as_on_cuda(library):
            results.append(both_ways())
        assert_faultless(library)
    for ours, true in zip(*results, strict=True):
        torch.testing.assert_close(ours, true, rtol=1e-4, atol=1e-4 * true.abs().max().item())
