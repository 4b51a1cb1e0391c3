"""The kernels of scaled, masked softmax against the formula in fp64."""

import pytest
import torch

from megazero.ops.scaled_softmax import (
    same_document,
    scaled_softmax,
    scaled_softmax_cuda,
    scaled_softmax_reference,
)
from tests.kernels.harness import DTYPES, WIDTHS, Bound, in_every_order, same_bits, watched
from tests.tables import over_table


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape) + seed)).to(dtype)


def mask_of(*shape):
    """About half of the keys; of the first row none."""
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(sum(shape))) < 0.5
    mask[..., 0, :] = False
    return mask


def by_kernels(scores, grad, scale, causal, mask, document_ids=None):
    def run(kernels):
        leaf = scores.detach().requires_grad_()
        probs = scaled_softmax_cuda(leaf, scale, causal, mask, kernels, document_ids=document_ids)
        return probs, torch.autograd.grad(probs, leaf, grad)[0]

    return in_every_order(run)


def check(scores, scale=0.7, causal=False, mask=None, document_ids=None):
    grad = random(*scores.shape, dtype=scores.dtype, seed=1)
    probs, grad_scores = by_kernels(scores, grad, scale, causal, mask, document_ids)
    exact = scaled_softmax_reference(scores.double(), scale, causal, mask, document_ids=document_ids)
    # A score's distance from the largest is rounded in proportion to their size.
    size = 1 + (scale * scores.double()).abs().amax(-1, keepdim=True) if scores.numel() else 1.0
    tiny = 2.0**-23 / torch.finfo(scores.dtype).eps
    assert Bound(1, 4 * tiny * size * exact).holds(probs, exact)
    assert not probs[exact == 0].any()
    # Backward starts from the probabilities as they were stored.
    stored, wide = probs.double(), grad.double()
    terms = (stored * wide).sum(-1, keepdim=True)
    true = scale * stored * (wide - terms)
    floor = abs(scale) * stored * (wide.abs() + (stored * wide.abs()).sum(-1, keepdim=True))
    assert Bound(1, 4 * tiny * floor).holds(grad_scores, true)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_width(dtype):
    for width in WIDTHS:
        check(random(1, 1, 1 + width % 3 if width < 70 else 1, width, dtype=dtype))


@over_table("dtype", DTYPES, ids=str)
@over_table(("q", "k"), [(1, 1), (5, 5), (16, 16), (33, 33), (3, 40), (40, 3)])
def test_causal(dtype, q, k):
    """Also with fewer queries than keys, and with more: then the first see nothing."""
    check(random(2, 1, q, k, dtype=dtype), causal=True)


@over_table("shape", [(2, 1, 2, 0), (2, 1, 0, 4), (0, 1, 2, 4)])
@over_table("masked", [False, True])
def test_nothing_to_sum(shape, masked):
    library = watched()
    scores = torch.zeros(shape, requires_grad=True)
    mask = torch.ones(shape, dtype=torch.bool) if masked else None
    probs = scaled_softmax_cuda(scores, 1.0, True, mask, library)
    probs.sum().backward()
    assert probs.shape == scores.grad.shape == shape
    assert not library.report().kernels


@over_table("causal", [False, True])
@over_table("k", [16, 37])
@over_table("shape", ["bnqk", "b1qk", "11qk", "1nqk", "b11k", "qk", "1k", "bnq1", "nqk", "b1q1"])
def test_masks_of_every_shape(shape, k, causal):
    sizes = {"b": 2, "n": 3, "q": 4, "k": k, "1": 1}
    mask = mask_of(*(sizes[each] for each in shape))
    check(random(2, 3, 4, k, dtype=torch.bfloat16), 0.3, causal, mask)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [8193, 8200])
def test_rows_of_several_tiles(dtype, width):
    check(random(1, 1, 2, width, dtype=dtype), 0.5, False, mask_of(2, width))
    check(random(1, 1, 1, width, dtype=dtype), 0.5, True)


def test_a_row_that_may_attend_to_nothing_gives_zeros():
    probs, grad = by_kernels(random(1, 1, 2, 8), random(1, 1, 2, 8), 1.0, False, mask_of(2, 8))
    assert not probs[..., 0, :].any()
    assert not grad[..., 0, :].any()
    assert probs[..., 1, :].sum() == pytest.approx(1)


@pytest.mark.parametrize("k", [4, 5])
def test_extreme_scores(k):
    """What the mask hides may be anything; NaN and infinity that are seen spoil their row, as in fp64."""
    inf, nan = torch.inf, torch.nan
    rows = [
        [nan, 1, inf, 2],
        [-inf, 1, -inf, 2],
        [3e38, -3e38, 0, 0],
        [-inf] * 4,
        [nan, 0, 0, 0],
        [inf, 0, 0, 0],
    ]
    scores = torch.nn.functional.pad(torch.tensor(rows), (0, k - 4))
    mask = torch.ones(6, k, dtype=torch.bool)
    mask[0, [0, 2]] = False
    mask[:, 4:] = False
    scores = scores.view(1, 1, 6, k)
    probs, _ = by_kernels(scores, torch.ones_like(scores), 1.0, False, mask)
    exact = scaled_softmax_reference(scores.double(), 1.0, False, mask)
    seen = mask.view_as(probs)
    assert Bound(4).holds(probs[seen], exact[seen])
    assert probs[0, 0, 3, :4].isnan().all()


@pytest.mark.parametrize("shape", [(3, 4, 8), (4, 8)])
def test_scores_of_fewer_dims(shape):
    check(random(*shape), causal=True, mask=mask_of(*shape))


def test_strided_and_shifted_scores():
    check(random(2, 3, 8, 8, dtype=torch.bfloat16).transpose(2, 3), mask=mask_of(8, 8).t())
    check(random(1 + 2 * 16)[1:].view(1, 1, 2, 16), mask=mask_of(2, 16))


def documents(b, k, *, ones=True, seed=0):
    """int32 [b, k]: documents of random lengths, other ones in each sample; every second of 1 with `ones`."""
    g = torch.Generator().manual_seed(31 * k + seed)
    rows = []
    for _ in range(b):
        lengths = []
        while sum(lengths) < k:
            own = int(torch.randint(2, 3 + k // 3, (1,), generator=g))
            lengths += [own, 1] if ones else [own]
        rows.append(torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))[:k])
    return torch.stack(rows).to(torch.int32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_documents_of_every_width(dtype):
    """With documents of length 1 and without, causal or not by turns; at times fewer queries than keys."""
    for number, width in enumerate(each for each in WIDTHS if each not in (1023, 2048, 4093, 4098)):
        queries = min(width, 1 + width % 3 if width < 70 else 1)
        ids = documents(2 if width < 70 else 1, width, ones=width % 2 == 0)
        scores = random(len(ids), 2 if width < 20 else 1, queries, width, dtype=dtype)
        check(scores, causal=(number // 2 + DTYPES.index(dtype)) % 2 == 0, document_ids=ids)


@over_table("causal", [False, True])
@over_table("dtype", DTYPES, ids=str)
@over_table("width", [8, 16, 33])
def test_every_query_of_ragged_documents(dtype, width, causal):
    check(random(2, 2, width, width, dtype=dtype), causal=causal, document_ids=documents(2, width))


@pytest.mark.parametrize("causal", [False, True])
def test_documents_and_a_mask(causal):
    """Together they may leave a row nothing: then it is zeros."""
    ids = documents(2, 24)
    check(random(2, 3, 24, 24, dtype=torch.bfloat16), 0.3, causal, mask_of(2, 1, 24, 24), ids)
    check(random(2, 3, 24, 24), 0.3, causal, mask_of(2, 1, 1, 24).roll(3, 0), ids)


@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 8193), (torch.bfloat16, 8200)])
def test_documents_of_several_tiles(dtype, width):
    check(random(1, 1, 2, width, dtype=dtype), 0.5, True, document_ids=documents(1, width))


@pytest.mark.parametrize("width", [16, 19])
def test_a_document_may_come_back(width):
    ids = torch.tensor(
        [3, 3, 5, 5, 5, -1, 3, 3, -1, 7, 7, 7, 3, 5, 5, 3, 3, 3, -1][:width], dtype=torch.int32
    )
    for causal in (False, True):
        check(random(1, 2, width, width, dtype=torch.float16), causal=causal, document_ids=ids.view(1, -1))


@pytest.mark.parametrize("width", [16, 19])
def test_ids_of_every_integer_dtype(width):
    """Those of 64 bits count whole: they may differ beyond 32 bits only."""
    ids = documents(2, width)
    scores, grad = random(2, 2, width, width), random(2, 2, width, width, seed=1)
    wanted = by_kernels(scores, grad, 0.7, True, None, ids)
    for other in (ids.to(torch.int16), ids.to(torch.uint8), ids.long(), ids.long() << 32):
        found = by_kernels(scores, grad, 0.7, True, None, other)
        assert all(same_bits(a, b) for a, b in zip(found, wanted, strict=True))
    check(scores, document_ids=ids.long() << 40)


@pytest.mark.parametrize("width", [32, 35])
def test_what_lies_in_other_documents_may_be_anything(width):
    """Scores and gradients: NaN there changes nothing, forward or backward."""
    ids = documents(2, width)
    hidden = ~same_document(ids, width).expand(2, 2, width, width)
    scores, grad = random(2, 2, width, width), random(2, 2, width, width, seed=1)
    wanted = by_kernels(scores, grad, 0.7, False, None, ids)
    nan = torch.full_like(scores, torch.nan)
    found = by_kernels(
        torch.where(hidden, nan, scores), torch.where(hidden, nan, grad), 0.7, False, None, ids
    )
    assert all(same_bits(a, b) for a, b in zip(found, wanted, strict=True))
    assert not any(each[hidden].any() for each in found)


@pytest.mark.parametrize("lead", [1, 4])
def test_shifted_and_strided_ids(lead):
    """They begin within a pack, or every other number is one; so do the scores, or they do not."""
    ids = documents(1, 16)
    shifted = torch.cat([ids.new_zeros(1, lead), ids], 1)[:, lead:].contiguous().flatten()
    shifted = torch.cat([shifted.new_zeros(lead), shifted])[lead:].view(1, 16)
    check(random(1, 2, 16, 16, dtype=torch.bfloat16), causal=True, document_ids=shifted)
    check(random(1 + 256)[1:].view(1, 1, 16, 16), causal=True, document_ids=shifted)
    check(random(1, 1, 16, 16), document_ids=ids.repeat_interleave(2, 1)[:, ::2])


def test_one_document_is_none():
    scores, grad = random(2, 2, 9, 24), random(2, 2, 9, 24, seed=1)
    for causal in (False, True):
        wanted = by_kernels(scores, grad, 0.7, causal, None)
        found = by_kernels(scores, grad, 0.7, causal, None, torch.full((2, 24), -1, dtype=torch.int32))
        assert all(same_bits(a, b) for a, b in zip(found, wanted, strict=True))


@over_table(
    ("sizes", "ids"),
    [((2, 1, 4, 4), (1, 4)), ((2, 1, 4, 4), (2, 5)), ((1, 1, 5, 4), (1, 4)), ((4, 4), (1, 4))],
)
def test_ids_that_do_not_fit_the_scores_are_refused(sizes, ids):
    with pytest.raises(ValueError, match="`document_ids` must be"):
        scaled_softmax(torch.zeros(sizes), 1.0, True, None, document_ids=torch.zeros(ids, dtype=torch.int32))
    if len(sizes) == 4 and sizes[2] > sizes[3]:
        with pytest.raises(RuntimeError, match="must start"):
            scaled_softmax_cuda(
                torch.zeros(sizes),
                1.0,
                True,
                None,
                watched(),
                document_ids=torch.zeros(ids, dtype=torch.int32),
            )
