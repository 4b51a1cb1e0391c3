from __future__ import annotations

import time

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megazero.config.tree import ModelConfig
from megazero.train.flops import flops_per_token, measure_matmul_rate


def model(**fields):
    values = {"num_layers": 6, "hidden_size": 512, "num_attention_heads": 8, "seq_length": 512}
    return ModelConfig(**{**values, **fields})


def test_the_benchmark_model_by_hand():
    projections = 4 * 2 * 512 * 512
    attention = 2 * 2 * 256 * 512
    mlp = 2 * 2 * 512 * 2048
    assert 3 * (6 * (projections + attention + mlp) + 2 * 512 * 8192) == 147_849_216
    assert flops_per_token(model(), 8192) == 147_849_216.0


def test_without_a_mask_it_is_the_paper_formula():
    """Narayanan et al. 2021: 72 l h^2 (1 + s / 6h + V / 12lh) where nothing is recomputed."""
    layers, hidden, length, vocab = 24, 1024, 2048, 51200
    shape = model(num_layers=layers, hidden_size=hidden, num_attention_heads=16, seq_length=length)
    expected = 72 * layers * hidden**2 * (1 + length / (6 * hidden) + vocab / (12 * layers * hidden))
    assert flops_per_token(shape, vocab, causal=False) == pytest.approx(expected, rel=1e-12)


def test_llama_2_70b_is_close_to_six_per_parameter():
    shape = model(
        num_layers=80,
        hidden_size=8192,
        num_attention_heads=64,
        num_query_groups=8,
        ffn_hidden_size=28672,
        activation="swiglu",
        seq_length=4096,
    )
    parameters_in_products = 80 * (8192 * (8192 + 2 * 1024) + 8192 * 8192 + 3 * 8192 * 28672) + 8192 * 32000
    assert flops_per_token(shape, 32000) == 6 * parameters_in_products + 3 * 80 * 4 * 2048 * 8192


@pytest.mark.parametrize(
    "fields", [{}, {"num_query_groups": 2}, {"activation": "swiglu"}, {"kv_channels": 48}], ids=str
)
def test_equals_what_torch_counts_in_the_products(fields):
    """One layer and the head written out as products, forward and backward, counted by torch."""
    shape = model(num_layers=1, hidden_size=64, num_attention_heads=4, seq_length=32, **fields)
    length, hidden, heads, vocab = 32, 64, 4, 256
    query, key = heads * shape.head_dim, shape.kv_heads * shape.head_dim
    mlp = 3 if "activation" in fields else 2

    def weight(*size):
        return torch.ones(*size, requires_grad=True)

    x = weight(length, hidden)
    with FlopCounterMode(display=False) as counter:
        qkv = x @ weight(hidden, query + 2 * key)
        q = qkv[:, :query].view(length, heads, -1).transpose(0, 1)
        scores = q @ weight(heads, shape.head_dim, length)
        context = (scores @ weight(heads, length, shape.head_dim)).transpose(0, 1).reshape(length, query)
        x = context @ weight(query, hidden)
        inner = sum(x @ weight(hidden, shape.ffn_size) for _ in range(mlp - 1))
        x = inner @ weight(shape.ffn_size, hidden)
        (x @ weight(hidden, vocab)).sum().backward()
    assert counter.get_total_flops() == length * flops_per_token(shape, vocab, causal=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_matmul_rate_is_that_of_a_direct_timing(dtype):
    rate = measure_matmul_rate(dtype)
    left, right = torch.ones(1024, 512, dtype=dtype), torch.ones(512, 2048, dtype=dtype)
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        left @ right
        best = min(best, time.perf_counter() - start)
    direct = 2 * 1024 * 512 * 2048 / best
    assert direct / 10 < rate < direct * 10  # the machine may be busy; a wrong unit is off by more
