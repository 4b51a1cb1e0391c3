"""The kernels of attention against the formula in fp64: sizes, masks, documents, windows, groups, dropout."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megazero.ops.attention import cuda as attention_on_gpu
from megazero.ops.attention.call import AttentionCall
from megazero.ops.attention.cuda import attention_cuda
from megazero.ops.attention.documents import Documents
from megazero.ops.attention.kernel import Results
from megazero.ops.attention.pattern import ALL, CAUSAL, Pattern
from megazero.ops.attention.reference import attention_reference
from megazero.ops.dropout import AttentionDropout, dropout_mask_attention
from tests.kernels.harness import DTYPES, assert_faultless, in_every_order, watched

# Of the largest magnitude: a few roundings of the probabilities, which are of the inputs' dtype.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.5e-2, torch.float16: 2e-3}
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def inputs_of(s, t, b, n, g, d, dtype=torch.float32) -> list[Tensor]:
    """q, k, v and the gradients of the result and of the log-sum-exp."""
    draw = torch.Generator().manual_seed(s + 100 * t + d)
    shapes = ((s, b, n, d), (t, b, g, d), (t, b, g, d), (s, b, n * d), (b, n, s))
    dtypes = (*(dtype,) * 4, torch.float32)
    return [torch.randn(x, generator=draw).to(y) for x, y in zip(shapes, dtypes, strict=True)]


def both_ways(attend, inputs: list[Tensor], call: AttentionCall) -> list[Tensor]:
    """Result, log-sum-exp, and the gradients of both."""
    leaves = [x.clone().requires_grad_() for x in inputs[:3]]
    out, lse = attend(*leaves, call)
    finite = lse.masked_fill(lse == -torch.inf, 0)
    return [out.detach(), lse.detach(), *torch.autograd.grad((out, finite), leaves, inputs[3:])]


def close(ours: list[Tensor], inputs: list[Tensor], call: AttentionCall) -> None:
    true = both_ways(attention_reference, [x.double() for x in inputs], call)
    for number, (one, other) in enumerate(zip(ours, true, strict=True)):
        one = one.cpu()
        assert torch.equal(one == -torch.inf, other == -torch.inf), number
        found, wanted = (x.double().masked_fill(x == -torch.inf, 0) for x in (one, other))
        bound = TOLERANCE[inputs[0].dtype] * max(1.0, wanted.abs().amax().item())
        assert (found - wanted).abs().amax().item() <= bound, number


def check(inputs: list[Tensor], call: AttentionCall) -> list[Tensor]:
    """The results of the kernels, which are near the formula's and raise no complaint of the watch."""
    library = watched()
    ours = both_ways(lambda *given: attention_cuda(*given, kernels=library), inputs, call)
    assert_faultless(library)
    close(ours, inputs, call)
    return ours


def dropout_of(b: int, s: int, t: int) -> AttentionDropout:
    return AttentionDropout(0.3, torch.arange(3, 3 + b) * -7, range(5, 5 + s), range(9, 9 + 2 * t, 2), 4)


@each_dtype
@pytest.mark.parametrize("size", [1, 8, 20, 32, 40, 64, 72, 128])
def test_heads_of_every_size(size, dtype):
    call = AttentionCall(0.2, pattern=ALL.causally(size % 3 == 0), dropout=dropout_of(1, 21, 21))
    check(inputs_of(21, 21, 1, 2, 1, size, dtype), call)


@each_dtype
@pytest.mark.parametrize(("s", "t"), [(1, 1), (1, 90), (17, 17), (63, 65), (66, 33), (130, 130)])
def test_ragged_sizes(s, t, dtype):
    """Fewer queries than keys continue a cache; with more, the first see nothing, and give zeros and -inf."""
    inputs = inputs_of(s, t, 2, 2, 1, 16, dtype)
    out, lse, *_ = check(inputs, AttentionCall(0.3, pattern=CAUSAL))
    assert (lse == -torch.inf).sum() == 4 * max(0, s - t)
    assert not out[: max(0, s - t)].any()
    check(inputs, AttentionCall(0.3, dropout=dropout_of(2, s, t)))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [(0, 0), (3, -1), (-1, 2), (20, 7), (70, 70)])
def test_windows(window, causal):
    near = Pattern(window)
    check(inputs_of(100, 100, 1, 1, 1, 8, torch.bfloat16), AttentionCall(0.3, pattern=near.causally(causal)))
    check(inputs_of(20, 100, 1, 1, 1, 8, torch.bfloat16), AttentionCall(0.3, pattern=near.causally(causal)))


IDS = torch.tensor([[0] * 30 + [1] + [2] * 69 + [-1] * 40, [5] * 50 + [6] * 40 + [5] * 50])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, (40, -1)])
@pytest.mark.parametrize("ids", [IDS, IDS.to(torch.int32), IDS << 40], ids=["64", "32", "beyond 32"])
def test_documents_which_may_come_back(ids, window, causal):
    near = Pattern(window)
    call = AttentionCall(
        0.3, documents=Documents(ids), pattern=near.causally(causal), dropout=dropout_of(2, 140, 140)
    )
    check(inputs_of(140, 140, 2, 2, 1, 16, torch.bfloat16), call)
    check(
        inputs_of(9, 140, 2, 2, 1, 16),
        AttentionCall(0.3, documents=Documents(ids), pattern=near),
    )


def test_other_documents_tiles_are_not_read():
    """NaN in the tiles of another document reaches nothing, forward or backward."""
    inputs = inputs_of(256, 256, 1, 1, 1, 8, torch.bfloat16)
    for x in inputs[:4]:
        x[128:] = torch.nan
    library, call = watched(), AttentionCall(0.3, documents=Documents(torch.arange(256).view(1, -1) // 128))
    ours = both_ways(lambda *given: attention_cuda(*given, kernels=library), inputs, call)
    halves = [x[..., :128] if x.dim() == 3 and x.shape[-1] == 256 else x[:128] for x in (*inputs, *ours)]
    close(halves[5:], halves[:5], AttentionCall(0.3))


@pytest.mark.parametrize("shape", [(2, 4, 40, 70), (1, 1, 40, 70), (2, 1, 1, 70), (40, 70), (2, 4, 40, 1)])
def test_masks_of_every_shape(shape):
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(4)) > 0.4
    mask.view(-1, shape[-1])[0] = False
    inputs = inputs_of(40, 70, 2, 4, 2, 16, torch.float16)
    out, lse, *_ = check(inputs, AttentionCall(0.3, mask=mask, dropout=dropout_of(2, 40, 70)))
    assert lse[0, 0, 0] == -torch.inf
    assert not out[0, 0, :16].any()


@each_dtype
def test_the_mask_of_dropout_is_that_of_a_cpu_bit_for_bit(dtype):
    """Values that are rows of the identity let each probability through by itself."""
    q, k, *_ = inputs_of(70, 70, 2, 3, 3, 70, dtype)
    by_query = torch.arange(140).view(70, 2) * 31 - 900
    for keys in (torch.tensor([3, -8]), by_query):
        dropout = AttentionDropout(0.4, keys, range(9, 79), torch.arange(140).view(70, 2), 5)
        values = torch.eye(70, dtype=dtype).view(70, 1, 1, 70).expand(-1, 2, 3, -1)
        out, _ = attention_cuda(q, k, values, AttentionCall(0.1, dropout=dropout), kernels=watched())
        kept = out.view(70, 2, 3, 70).permute(1, 2, 0, 3) != 0
        assert torch.equal(kept, dropout_mask_attention(dropout, 2, 3, 70, 70))


def test_any_order_of_the_threads_gives_the_same_bits():
    inputs = inputs_of(70, 70, 1, 4, 2, 24, torch.bfloat16)
    call = AttentionCall(0.3, pattern=CAUSAL, dropout=dropout_of(1, 70, 70))
    bits = in_every_order(
        lambda kernels: both_ways(lambda *x: attention_cuda(*x, kernels=kernels), inputs, call)
    )
    close(bits, inputs, call)


def test_slices_of_one_projection_are_read_where_they_are(monkeypatch):
    together = torch.randn(33, 2, 4, 3, 16)
    inputs = [*(x.squeeze(3) for x in together.split(1, dim=3)), *inputs_of(33, 33, 2, 4, 4, 16)[3:]]
    assert all(attention_on_gpu._readable(x) is x for x in inputs[:3])
    check(inputs, AttentionCall(0.3, pattern=CAUSAL))
    shifted = torch.randn(2 * 33 * 2 * 16 + 1)[1:].view(66, 2, 1, 16)[::2]  # not where packs begin
    assert attention_on_gpu._readable(shifted) is not shifted
    check([shifted, shifted, shifted, *inputs_of(33, 33, 2, 1, 1, 16)[3:]], AttentionCall(0.3))


def test_only_one_of_the_results_has_a_gradient():
    for which in (0, 1):
        grads = []
        for attend in (lambda *x: attention_cuda(*x, kernels=watched()), attention_reference):
            leaves = [x.requires_grad_() for x in inputs_of(20, 20, 1, 2, 1, 8)[:3]]
            result = attend(*leaves, AttentionCall(0.3, pattern=CAUSAL))[which]
            grads.append(torch.autograd.grad(result.sin().sum(), leaves, materialize_grads=True))
        for ours, true in zip(*grads, strict=True):
            torch.testing.assert_close(ours, true, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sizes", [(0, 5, 1, 2, 1, 8), (5, 0, 1, 2, 1, 8), (5, 5, 0, 2, 1, 8)], ids=str)
def test_nothing_gives_zeros(sizes):
    library = watched()
    *leaves, grad, _ = inputs_of(*sizes)
    leaves = [x.requires_grad_() for x in leaves]
    out, lse = attention_cuda(*leaves, AttentionCall(0.3, pattern=CAUSAL), kernels=library)
    assert out.shape == grad.shape
    assert not out.any()
    assert bool((lse == -torch.inf).all())
    assert not any(x.any() for x in torch.autograd.grad(out, leaves, grad, materialize_grads=True))
    assert not library.report().kernels


def test_a_head_that_is_too_wide_is_refused():
    q, k, v, *_ = inputs_of(4, 4, 1, 1, 1, 136)
    with pytest.raises(RuntimeError, match=r"must start, but CUDA says: invalid argument"):
        attention_cuda(q, k, v, AttentionCall(0.3), kernels=watched())


def test_more_samples_than_a_grid_has_are_refused_by_name():
    q = torch.empty(1, 65_536, 1, 8)
    with pytest.raises(ValueError, match=r"at most 65,535 samples and heads, but has 65,536 and 1"):
        attention_cuda(q, q, q, AttentionCall(1.0), kernels=watched())


def test_parts_are_in_fp32_and_round_to_what_a_whole_gives():
    """The parts of a ring were made in the queries' type, and each rounded once more."""
    *sides, grad, _ = inputs_of(70, 70, 2, 4, 2, 24, torch.bfloat16)
    library, call = watched(), AttentionCall(0.3, pattern=CAUSAL, dropout=dropout_of(2, 70, 70))
    kernel = replace(attention_cuda, kernels=library)
    made = {}
    for dtype in (torch.float32, torch.bfloat16):
        out, lse = kernel.forward(*sides, kernel.prepare(*sides, call), dtype)
        results = Results(out.bfloat16(), lse, grad.view(70, 2, 4, 24), None)
        made[dtype] = [out, *kernel.backward(*sides, results, kernel.prepare(*sides, call), dtype)]
    assert_faultless(library)
    for wide, narrow in zip(made[torch.float32], made[torch.bfloat16], strict=True):
        assert (wide.dtype, narrow.dtype) == (torch.float32, torch.bfloat16)
        assert torch.equal(wide.bfloat16(), narrow)
        assert not torch.equal(wide, narrow.float())


def test_blocks_share_the_heads_of_a_group_where_there_are_few():
    """Gradients of keys of one group and 2,048 keys were made by 32 blocks, on a device that runs 132."""
    shares = {
        (4096, 1, 32, 4, torch.bfloat16): 1,  # 256 blocks
        (4096, 1, 64, 2, torch.bfloat16): 2,
        (2048, 1, 8, 1, torch.bfloat16): 8,
        (2048, 1, 8, 1, torch.float32): 4,
        (100, 1, 6, 3, torch.float16): 2,  # no more heads
        (4096, 4, 8, 8, torch.bfloat16): 1,
    }
    for (t, b, n, g, dtype), wanted in shares.items():
        q, k = (torch.empty(t, b, heads, 8, dtype=dtype, device="meta") for heads in (n, g))
        assert attention_on_gpu._shares(q, k) == wanted, (t, b, n, g)


def test_a_block_of_queries_that_see_nothing():
    """Its copies of a first tile are waited for too, before results go through its own."""
    out, lse, *_ = check(inputs_of(150, 10, 1, 1, 1, 8, torch.bfloat16), AttentionCall(0.3, pattern=CAUSAL))
    assert bool((lse[..., :140] == -torch.inf).all())
    assert not out[:140].any()
