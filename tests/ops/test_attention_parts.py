"""Attention over parts of the keys, merged by hand: forward and backward of each kernel against the whole."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megazero.ops import native
from megazero.ops.attention import Part, Pattern, Softcap, backward_of_part, forward_of_part, parts
from megazero.ops.attention.call import AttentionCall
from megazero.ops.attention.cuda import _CudaByMask
from megazero.ops.attention.flash_cpu import attention_flash_cpu
from megazero.ops.attention.kernel import Results
from megazero.ops.attention.native_cpu import attention_native_cpu
from megazero.ops.attention.pattern import CAUSAL
from megazero.ops.attention.reference import attention_reference
from megazero.ops.dispatch import Implementation
from megazero.ops.dropout import AttentionDropout
from tests.kernels.harness import watched
from tests.tables import over_table

S, B, N, G, D = 44, 2, 4, 2, 12
built = pytest.mark.skipif(not native.available(), reason="the compiled kernels are not built")
KERNELS = {
    "native": pytest.param(lambda: attention_native_cpu, marks=built, id="native"),
    "flash": pytest.param(lambda: attention_flash_cpu, id="flash"),
    "reference": pytest.param(lambda: attention_reference, id="reference"),
    "cuda": pytest.param(lambda: _CudaByMask(watched()), id="cuda"),
}
each_kernel = pytest.mark.parametrize("kernel_of", KERNELS.values())


def inputs(dtype=torch.float32) -> list[Tensor]:
    torch.manual_seed(4)
    shapes = ((S, B, N, D), (S, B, G, D), (S, B, G, D), (S, B, N, D))
    return [torch.randn(shape).to(dtype) for shape in shapes]


def merge(results: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """All parts' results [s, b, n, d] as one, and the log-sum-exp over all keys, -inf where it is of all."""
    outs, lses = (torch.stack(x) for x in zip(*results, strict=True))
    lse = torch.logsumexp(lses, 0)
    weights = (lses - lse.masked_fill(lse == -torch.inf, 0)).exp()
    return (outs * weights.permute(0, 3, 1, 2).unsqueeze(-1)).sum(0), lse


def by_parts(call_of, size: int, q, k, v, grad) -> list[Tensor]:
    """Result, log-sum-exp and gradients over keys in parts of `size`, as `forward_of_part` merges."""
    cuts = [slice(start, start + size) for start in range(0, len(k), size)]
    out, lse = merge([forward_of_part(q, k[cut], v[cut], call_of(cut)) for cut in cuts])
    grads = [backward_of_part(q, k[cut], v[cut], out, lse, grad, call_of(cut)) for cut in cuts]
    grads_q, grads_k, grads_v = zip(*grads, strict=True)
    return [out, lse, sum(grads_q), torch.cat(grads_k), torch.cat(grads_v)]


def whole(call: AttentionCall, q, k, v, grad) -> list[Tensor]:
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    out, lse = attention_reference(*leaves, call)
    grads = torch.autograd.grad(out, leaves, grad.double().flatten(2))
    return [out.detach().view(grad.shape), lse.detach(), *grads]


def agree(ours: list[Tensor], true: list[Tensor], bound: float) -> None:
    for number, (one, other) in enumerate(zip(ours, true, strict=True)):
        assert torch.equal(one == -torch.inf, other == -torch.inf), number
        one, other = (x.double().masked_fill(x == -torch.inf, 0) for x in (one, other))
        assert (one - other).abs().max() <= bound * max(1.0, other.abs().max().item()), number


def dropout_of(keys: range) -> AttentionDropout:
    return AttentionDropout(0.3, torch.tensor([3, 9]), range(S), keys, head_offset=2)


@pytest.fixture(name="use")
def _use(monkeypatch):
    """Make `forward_of_part` and `backward_of_part` run a kernel, whatever the table says."""
    chosen = parts.chosen

    def use(kernel):
        def choose(q, k, v, call, lse):
            _, call = chosen(q, k, v, call, lse=lse)
            return Implementation("tried", kernel), call

        monkeypatch.setattr(parts, "chosen", choose)

    return use


@each_kernel
@pytest.mark.parametrize("dropped", [False, True])
@pytest.mark.parametrize("size", [1 + S // 3, S])
def test_parts_merge_to_the_whole(kernel_of, dropped, size, use):
    """With a window, so that some parts are empty for some queries, and a query that sees nothing at all."""
    use(kernel_of())
    q, k, v, grad = inputs()
    mask = torch.ones(B, 1, S, S, dtype=torch.bool)
    mask[0, 0, 5] = False

    def call_of(cut: slice) -> AttentionCall:
        keys = range(S)[cut]
        dropout = dropout_of(keys) if dropped else None
        return AttentionCall(
            0.3, mask[..., cut], dropout=dropout, pattern=Pattern((9, 0)), part=Part(0, keys.start)
        )

    true_mask = Pattern((9, 0)).allowed(True, range(S), range(S), torch.device("cpu")) & mask
    dropout = dropout_of(range(S)) if dropped else None
    true = whole(AttentionCall(0.3, mask=true_mask, dropout=dropout), q, k, v, grad)
    ours = by_parts(call_of, size, q, k, v, grad)
    assert all(x.dtype == torch.float32 for x in ours)
    agree(ours, true, 1e-5)
    assert not ours[0][5, 0].any()
    assert not ours[2][5, 0].any()


def test_parts_of_bounded_scores_merge_to_the_whole():
    """By the formula, whose backward pass is its own here; gradients are those that autograd finds."""
    given = inputs()
    true = whole(AttentionCall(0.9, bias=Softcap(0.6)), *given)
    ours = by_parts(lambda cut: AttentionCall(0.9, bias=Softcap(0.6)), 1 + S // 3, *given)
    agree(ours, true, 1e-5)
    plain = whole(AttentionCall(0.9), *given)
    assert all((one - other).abs().max() > 0.01 for one, other in zip(ours, plain, strict=True))


@each_kernel
def test_empty_rows_have_no_gradients(kernel_of, use):
    """Their log-sum-exp is -inf over all keys, so that no part of them has a share, masked there or not."""
    use(kernel_of())
    q, k, v, grad = inputs()
    call = AttentionCall(0.3)
    out, lse = forward_of_part(q, k, v, call)
    lse[1, :, 7], out[7, 1] = -torch.inf, 0
    grads = backward_of_part(q, k, v, out, lse, grad, call)
    assert all(x.isfinite().all() for x in grads)
    assert not grads[0][7, 1].any()
    others = [torch.cat((x[:7], x[8:])) for x in (q, out, grad)]
    left = torch.cat((lse[..., :7], lse[..., 8:]), -1)
    alone = backward_of_part(others[0], k, v, others[1], left, others[2], call)
    torch.testing.assert_close(grads[1][:, 1], alone[1][:, 1], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(grads[2][:, 1], alone[2][:, 1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kernel_of", [KERNELS["native"], KERNELS["flash"]])
def test_errors_in_bf16_do_not_grow_with_the_number_of_parts(kernel_of, use):
    use(kernel_of())
    given = inputs(torch.bfloat16)
    true = whole(AttentionCall(0.3), *given)

    def error(size: int) -> list[float]:
        ours = by_parts(lambda cut: AttentionCall(0.3), size, *given)
        return [
            (one - other).norm().item() / other.norm().item() for one, other in zip(ours, true, strict=True)
        ]

    one, many = error(S), error(S // 11)
    assert all(y <= max(1.2 * x, 1e-3) for x, y in zip(one, many, strict=True)), (one, many)


@each_kernel
def test_the_log_sum_exp_has_a_gradient_too(kernel_of):
    kernel, (q, k, v, grad), call = kernel_of(), inputs(), AttentionCall(0.3, pattern=CAUSAL)
    given = kernel.prepare(q, k, v, call)
    out, lse = kernel.forward(q, k, v, given, torch.float32)
    results = Results(out, lse, grad, torch.full_like(lse, 2.0))
    ours = kernel.backward(q, k, v, results, given, torch.float32)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    true = attention_reference(*leaves, call)
    grads = torch.autograd.grad(true, leaves, (grad.double().flatten(2), torch.full_like(true[1], 2.0)))
    agree([*ours], [*grads], 1e-5)


@over_table(
    ("first", "second", "merged"),
    [
        ((0.0, 1.0), (100.0, 3.0), 3.0),
        ((100.0, 1.0), (0.0, 3.0), 1.0),
        ((-torch.inf, 0.0), (0.0, 3.0), 3.0),
        ((0.0, 1.0), (-torch.inf, 0.0), 1.0),
        ((-torch.inf, 0.0), (-torch.inf, 0.0), 0.0),
        ((1e4, 1.0), (-1e4, 3.0), 1.0),
        ((2.0, 1.0), (2.0, 3.0), 2.0),
    ],
)
def test_log_sum_exps_far_apart_merge(first, second, merged):
    parts = [(torch.full((1, 1, 1, 1), out), torch.full((1, 1, 1), lse)) for lse, out in (first, second)]
    out, lse = merge(parts)
    assert out.item() == merged
    assert not lse.isnan().any()


def test_those_that_the_table_chooses_are_compiled():
    if native.available():
        call = AttentionCall(0.3, pattern=CAUSAL)
        for dtype in (torch.float32, torch.bfloat16):
            q, k, v, _ = inputs(dtype)
            assert parts._kernel(q, k, v, call)[0] is attention_native_cpu
