"""Model FLOPs per token, and how many matmul FLOPs per second this machine can do.

A matrix product of [m, k] and [k, n] takes 2 m k n FLOPs: k multiplications and k additions per output.
"""

from __future__ import annotations

import statistics
import time

import torch

from megazero.config.tree import ModelConfig

# Backward makes two products for each one of forward: the gradients of both its factors.
_FORWARD_AND_BACKWARD = 3


def flops_per_token(model: ModelConfig, padded_vocab: int, *, causal: bool = True) -> float:
    """FLOPs that one token of training needs, forward and backward.

    Counts the matrix products alone, as Megatron-LM does (Narayanan et al. 2021, arXiv:2104.04473, with
    its later refinements): per layer and token, with hidden size h, s tokens of sequence, q = heads x
    head width and k = key/value heads x head width,

    - query, key, value and output projections: 2 h (q + 2 k) + 2 q h;
    - scores and their product with the values: 2 s q each, of which a causal mask needs half;
    - MLP of inner width f: 2 matrices of h f, or 3 with SwiGLU;

    and once 2 h V for the logits. Backward costs twice forward. What is computed again by activation
    recompute is not counted, because the model does not need it; nor are norms, activations and the
    embedding lookup, which take no matrix product.

    Args:
        model: the model's shape; `seq_length` is the s above.
        padded_vocab: rows V of the output head.
        causal: False counts attention in both directions (BERT).
    """
    hidden = model.hidden_size
    query = model.num_attention_heads * model.head_dim
    key = model.kv_heads * model.head_dim
    projections = 2 * hidden * (query + 2 * key) + 2 * query * hidden
    attended = model.seq_length / 2 if causal else model.seq_length
    attention = 2 * (2 * attended * query)
    mlp_matrices = 3 if model.activation == "swiglu" else 2
    mlp = mlp_matrices * 2 * hidden * model.ffn_size
    logits = 2 * hidden * padded_vocab
    return float(_FORWARD_AND_BACKWARD * (model.num_layers * (projections + attention + mlp) + logits))


def measure_matmul_rate(dtype: torch.dtype, device: torch.device | str = "cpu") -> float:
    """Matmul speed of this process on `device`, FLOP/s: the yardstick of `matmul_share`.

    Times products of a small GPT's MLP ([1024, 512] x [512, 2048] on CPU, 8192^3 on CUDA) for about a
    tenth of a second and takes the median. It uses the threads that torch is set to, so
    measure on all ranks at once to see what each one gets of a shared machine.
    """
    device = torch.device(device)
    rows, inner, columns = (8192, 8192, 8192) if device.type == "cuda" else (1024, 512, 2048)
    left = torch.ones(rows, inner, dtype=dtype, device=device)
    right = torch.ones(inner, columns, dtype=dtype, device=device)
    out = left @ right  # warm-up: the library picks its kernel and threads start
    seconds: list[float] = []
    while len(seconds) < 3 or (sum(seconds) < 0.1 and len(seconds) < 100):
        _synchronize(device)
        start = time.perf_counter()
        torch.matmul(left, right, out=out)
        _synchronize(device)
        seconds.append(time.perf_counter() - start)
    return 2.0 * rows * inner * columns / statistics.median(seconds)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
