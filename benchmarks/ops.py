"""Each operator's front against the plain torch composition of the same math, forward and backward.

Shapes of a GPT with hidden size 512, 8 heads and a vocabulary of 8192, at 4 x 512 tokens. The two
contenders take turns, so that drift of the machine hits both; one JSON line per operator, dtype and
thread count gives the median of the rounds' time ratios (above 1: ours is faster).

    python benchmarks/ops.py --rounds 15 --threads 1 2 --only rms_norm swiglu
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megazero.mpu.solo_group import SoloGroup
from megazero.ops.attention import attention
from megazero.ops.bias_dropout_add import bias_dropout_add
from megazero.ops.bias_gelu import bias_gelu
from megazero.ops.cross_entropy import VocabularySlice, vocab_parallel_cross_entropy
from megazero.ops.dropout import AttentionDropout, Dropout
from megazero.ops.layer_norm import layer_norm
from megazero.ops.rms_norm import rms_norm
from megazero.ops.rotary import apply_rotary, rotary_table
from megazero.ops.scaled_softmax import scaled_softmax
from megazero.ops.squared_relu import squared_relu
from megazero.ops.swiglu import swiglu
from megazero.ops.update import StepFacts, UpdateCall, update_step
from megazero.optim.elementwise import Adam

S, B, H, HEADS, VOCAB = 512, 4, 512, 8, 8192
HEAD_DIM = H // HEADS


@dataclass(frozen=True)
class Contest:
    """Two functions of the same tensors; those that require grad are differentiated."""

    name: str
    inputs: tuple[Tensor, ...]
    ours: Callable[..., Tensor]
    torchs: Callable[..., Tensor]


def _norms(leaf: Callable[..., Tensor]) -> Iterator[Contest]:
    yield Contest(
        "layer_norm",
        (leaf(S, B, H), leaf(H), leaf(H)),
        lambda x, w, b: layer_norm(x, w, b, 1e-5),
        lambda x, w, b: F.layer_norm(x, (H,), w, b, 1e-5),
    )
    yield Contest(
        "rms_norm",
        (leaf(S, B, H), leaf(H)),
        lambda x, w: rms_norm(x, w, 1e-5),
        lambda x, w: F.rms_norm(x, (H,), w, 1e-5),
    )


def _activations(leaf: Callable[..., Tensor]) -> Iterator[Contest]:
    yield Contest(
        "bias_gelu",
        (leaf(S, B, 4 * H), leaf(4 * H)),
        lambda x, b: bias_gelu(x, b),
        lambda x, b: F.gelu(x + b, approximate="tanh"),
    )
    yield Contest(
        "gelu",
        (leaf(S, B, 4 * H),),
        lambda x: bias_gelu(x, None),
        lambda x: F.gelu(x, approximate="tanh"),
    )
    yield Contest(
        "swiglu",
        (leaf(S, B, 2, 1408),),
        swiglu,
        lambda x: F.silu(x[..., 0, :]) * x[..., 1, :],
    )
    yield Contest("squared_relu", (leaf(S, B, 4 * H),), squared_relu, lambda x: F.relu(x).square())


def _dropouts(leaf: Callable[..., Tensor]) -> Iterator[Contest]:
    dropout = Dropout(0.1, torch.arange(B), range(S))
    yield Contest(
        "bias_dropout_add",
        (leaf(S, B, H), leaf(H), leaf(S, B, H)),
        lambda x, b, r: bias_dropout_add(x, b, r, dropout),
        lambda x, b, r: r + F.dropout(x + b, 0.1),
    )
    yield Contest(
        "bias_add (p = 0)",
        (leaf(S, B, H), leaf(H), leaf(S, B, H)),
        lambda x, b, r: bias_dropout_add(x, b, r, None),
        lambda x, b, r: r + (x + b),
    )


def _turn_by_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def _attentions(leaf: Callable[..., Tensor]) -> Iterator[Contest]:
    heads = leaf(S, B, HEADS, HEAD_DIM)
    cos, sin = rotary_table(torch.arange(S), HEAD_DIM, 10000.0)
    wide_cos, wide_sin = (torch.cat((each, each), -1).to(heads.dtype) for each in (cos, sin))
    yield Contest(
        "rotary",
        (heads,),
        lambda x: apply_rotary(x, cos, sin),
        lambda x: _turn_by_halves(x, wide_cos, wide_sin),
    )
    order = torch.ones(S, S, dtype=torch.bool).tril()
    yield Contest(
        "scaled_softmax",
        (leaf(B, HEADS, S, S),),
        lambda x: scaled_softmax(x, 0.125, True, None),
        lambda x: torch.softmax((x.float() * 0.125).masked_fill(~order, -torch.inf), -1).to(x.dtype),
    )

    def sdpa(q: Tensor, k: Tensor, v: Tensor, p: float = 0.0) -> Tensor:
        out = F.scaled_dot_product_attention(
            *(each.permute(1, 2, 0, 3) for each in (q, k, v)),
            dropout_p=p,
            is_causal=True,
            enable_gqa=k.shape[2] != HEADS,
        )
        return out.permute(2, 0, 1, 3).reshape(S, B, H)

    full = tuple(leaf(S, B, HEADS, HEAD_DIM) for _ in range(3))
    yield Contest("attention", full, lambda q, k, v: attention(q, k, v, causal=True), sdpa)
    grouped = (full[0], leaf(S, B, 2, HEAD_DIM), leaf(S, B, 2, HEAD_DIM))
    yield Contest("attention (2 groups)", grouped, lambda q, k, v: attention(q, k, v, causal=True), sdpa)
    dropout = AttentionDropout(0.1, torch.arange(B), range(S), range(S))
    yield Contest(
        "attention_dropout",
        full,
        lambda q, k, v: attention(q, k, v, causal=True, dropout=dropout),
        lambda q, k, v: sdpa(q, k, v, 0.1),
    )


def _losses(leaf: Callable[..., Tensor]) -> Iterator[Contest]:
    target = torch.randint(VOCAB, (S, B))
    yield Contest(
        "cross_entropy",
        (leaf(S, B, VOCAB),),
        lambda x: vocab_parallel_cross_entropy(x, target, VocabularySlice(SoloGroup(), 0, VOCAB)),
        lambda x: F.cross_entropy(x.float().view(-1, VOCAB), target.view(-1), reduction="none").view(S, B),
    )


def contests(dtype: torch.dtype) -> Iterator[Contest]:
    def leaf(*shape: int) -> Tensor:
        return torch.randn(*shape).to(dtype).requires_grad_()

    for family in (_norms, _activations, _dropouts, _attentions, _losses):
        yield from family(leaf)


def _seconds(act: Callable[[], object]) -> float:
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


def _ratio(ours: Callable[[], object], torchs: Callable[[], object], rounds: int) -> dict[str, float]:
    """Median milliseconds of both and the median of the rounds' ratios; one round to warm up."""
    pairs = [(_seconds(ours), _seconds(torchs)) for _ in range(rounds + 1)][1:]
    return {
        "ours_ms": round(1e3 * statistics.median(own for own, _ in pairs), 3),
        "torch_ms": round(1e3 * statistics.median(other for _, other in pairs), 3),
        "ratio": round(statistics.median(other / own for own, other in pairs), 3),
    }


def measure(contest: Contest, rounds: int) -> dict[str, float]:
    grad = torch.randn_like(contest.ours(*contest.inputs))

    def step(function: Callable[..., Tensor]) -> None:
        torch.autograd.grad(function(*contest.inputs), contest.inputs, grad)

    return _ratio(lambda: step(contest.ours), lambda: step(contest.torchs), rounds)


def measure_adam(rounds: int) -> dict[str, float]:
    """Measure 23M fp32 parameters in 74 tensors, against torch.optim.AdamW(fused=True)."""
    params = [torch.randn(23_000_000 // 74) for _ in range(74)]
    states = [(torch.zeros_like(each), torch.zeros_like(each)) for each in params]
    grads = [torch.randn_like(each) for each in params]
    twins = [each.clone().requires_grad_() for each in params]
    for twin, grad in zip(twins, grads, strict=True):
        twin.grad = grad
    optimizer = torch.optim.AdamW(twins, lr=1e-4, fused=True)
    call = UpdateCall(Adam(), StepFacts(1, 1e-4, 0.01), params, grads, states, [None] * len(params))
    return _ratio(lambda: update_step(call), optimizer.step, rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--only", nargs="+", help="names of the operators to measure")
    args = parser.parse_args()
    torch.manual_seed(0)
    for threads in args.threads:
        torch.set_num_threads(threads)
        for dtype in args.dtypes:
            for contest in contests(getattr(torch, dtype)):
                if args.only is None or contest.name in args.only:
                    figures = measure(contest, args.rounds)
                    line = {"op": contest.name, "dtype": dtype, "threads": threads, **figures}
                    print(json.dumps(line), flush=True)
        if args.only is None or "adam" in args.only:
            line = {"op": "adam", "dtype": "float32", "threads": threads, **measure_adam(args.rounds)}
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
