"""Every kind of restriction by the compiled CPU kernel, without a mask of all pairs, against a dense mask."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megazero.ops import native
from megazero.ops.attention import (
    ALL,
    CAUSAL,
    BlockLayout,
    Documents,
    Part,
    Pattern,
    Slopes,
    attention,
)
from megazero.ops.attention.call import AttentionCall
from megazero.ops.attention.kernel import Results
from megazero.ops.attention.native_cpu import attention_native_cpu
from megazero.ops.attention.reference import attention_reference
from megazero.ops.dropout import AttentionDropout
from tests.ops.lse import attention_with_lse
from tests.tables import over_table

pytestmark = pytest.mark.skipif(not native.available(), reason="the compiled kernels are not built")

N, G, D = 4, 2, 12
SIZES = ((1, 1), (64, 64), (130, 130), (200, 200), (70, 200), (3, 150), (200, 70))


def layout_of(size: int, heads: int, places: int, density: float = 0.3) -> BlockLayout:
    blocks = -(-places // size)
    drawn = torch.rand(heads, blocks, blocks, generator=torch.Generator().manual_seed(size)) < density
    return BlockLayout(drawn, size)


PATTERNS = {
    "all": lambda t: ALL,
    "causal": lambda t: CAUSAL,
    "window": lambda t: Pattern((20, 0)),
    "window of one": lambda t: Pattern((0, 0)),
    "both sides": lambda t: Pattern((33, 5)),
    "later keys": lambda t: Pattern((-1, 70)),
    "sinks": lambda t: Pattern((20, 0), sinks=5),
    "sinks alone count": lambda t: Pattern((0, 0), sinks=100),
    "prefix": lambda t: Pattern((-1, 0), prefix=90),
    "prefix, window, sinks": lambda t: Pattern((30, 2), sinks=3, prefix=50),
    "blocks of 16": lambda t: Pattern(layout=layout_of(16, N, t)),
    "blocks of 32, causal": lambda t: Pattern((-1, 0), layout=layout_of(32, 1, t)),
    "blocks of 48": lambda t: Pattern(layout=layout_of(48, N, t)),
    "blocks of 64, window, sinks": lambda t: Pattern((90, 0), sinks=2, layout=layout_of(64, N, t, 0.6)),
    "blocks of 100": lambda t: Pattern(layout=layout_of(100, 1, t, 0.5)),
    "blocks of 128, causal": lambda t: Pattern((-1, 0), layout=layout_of(128, N, t, 0.5)),
}


def inputs_of(s: int, t: int, b: int = 2) -> list[Tensor]:
    """q, k, v and the gradient of the result."""
    draw = torch.Generator().manual_seed(s + 100 * t)
    shapes = ((s, b, N, D), (t, b, G, D), (t, b, G, D), (s, b, N, D))
    return [torch.randn(shape, generator=draw) for shape in shapes]


def both_passes(kernel, q, k, v, grad, call) -> list[Tensor]:
    """Result, log-sum-exp and the gradients of both."""
    given = kernel.prepare(q, k, v, call)
    out, lse = kernel.forward(q, k, v, given, q.dtype)
    results = Results(out, lse, grad, torch.full_like(lse, 0.5))
    return [out, lse, *kernel.backward(q, k, v, results, given, q.dtype)]


def agree(inputs: list[Tensor], call: AttentionCall, bound: float = 1e-5) -> list[Tensor]:
    """The kernel's results, which are near the formula's under one dense mask."""
    ours = both_passes(attention_native_cpu, *inputs, call)
    wide = [x.double() for x in inputs]
    true = both_passes(attention_reference, *wide, call.masked(*wide[:2]))
    for number, (one, other) in enumerate(zip(ours, true, strict=True)):
        assert torch.equal(one == -torch.inf, other == -torch.inf), number
        one, other = (x.double().masked_fill(x == -torch.inf, 0) for x in (one, other))
        assert (one - other).abs().max() <= bound * max(1.0, other.abs().max().item()), number
    return ours


@pytest.mark.parametrize("name", PATTERNS)
def test_patterns(name):
    """At every size, with all that a call may have besides: slopes, dropout, documents, a mask."""
    slopes = Slopes(torch.tensor([0.5, -0.25, 0.0, 1.0]))
    for s, t in SIZES:
        pattern, inputs = PATTERNS[name](max(s, t)), inputs_of(s, t)
        part = Part(0, 0) if s > t and pattern.layout is not None else None
        plain = AttentionCall(0.3, pattern=pattern, part=part)
        agree(inputs, plain)
        dropout = AttentionDropout(0.3, torch.arange(2), range(s), range(3, 3 + t), 1)
        mask = torch.rand(2, 1, s, t, generator=torch.Generator().manual_seed(s)) < 0.8
        agree(inputs, replace(plain, bias=slopes, dropout=dropout, mask=mask))
        if s <= t and part is None:
            ids = torch.stack(
                (torch.arange(t) // 37, torch.arange(t) % 3)
            )  # runs, and documents that come back
            agree(inputs, replace(plain, documents=Documents(ids), bias=slopes))


@pytest.mark.parametrize("name", PATTERNS)
def test_patterns_of_parts(name):
    """Queries and keys anywhere in their sequence, keys before or behind queries, with documents of both."""
    whole = Documents(torch.stack((torch.arange(400) // 77, torch.arange(400) // 150)))
    for query, key in itertools.product((0, 7, 150, 213), (0, 40, 160, 250)):
        pattern, inputs = PATTERNS[name](400), inputs_of(101, 133)
        call = AttentionCall(0.3, pattern=pattern, part=Part(query, key), bias=Slopes(torch.full((N,), 0.01)))
        agree(inputs, call)
        keys = slice(key, key + 133)
        part = Part(query, key, whole.ids[:, query : query + 101], whole.bounds[0][:, keys])
        agree(inputs, replace(call, part=part, documents=Documents(whole.ids[:, keys])))


@over_table("name", PATTERNS)
def test_patterns_in_bf16(name):
    pattern = PATTERNS[name](200)
    agree([x.bfloat16() for x in inputs_of(200, 200)], AttentionCall(0.3, pattern=pattern), 2e-2)


def test_what_makes_no_difference_is_left_out():
    """A ring's block of earlier keys is plain attention; so is one query behind all keys."""
    call = AttentionCall(0.3, pattern=CAUSAL, part=Part(100, 0))
    assert call.simplified(50, 100) == AttentionCall(0.3)
    assert AttentionCall(0.3, pattern=CAUSAL).simplified(1, 9) == AttentionCall(0.3)
    window = AttentionCall(0.3, pattern=Pattern((20, 0), sinks=4), part=Part(100, 50))
    assert window.simplified(50, 50).pattern == Pattern((20, -1))
    aligned = AttentionCall(0.3, pattern=CAUSAL, part=Part(70, 50))
    assert aligned.simplified(30, 50) == AttentionCall(0.3, pattern=CAUSAL)
    kept = AttentionCall(0.3, pattern=CAUSAL, part=Part(50, 50, torch.zeros(1, 9)))
    assert kept.simplified(9, 9) == kept


@over_table(
    ("pattern", "hidden"),
    [
        (Pattern((3, 0)), lambda q, k: k < q - 3 or k > q),
        (Pattern((3, 0), sinks=2), lambda q, k: 2 <= k < q - 3 or k > q),
        (Pattern((-1, 0), prefix=9), lambda q, k: k > q and max(q, k) >= 9),
        (Pattern((-1, 0), layout=layout_of(16, 1, 40)), lambda q, k: k > q),
    ],
    ids=("window", "sinks", "prefix", "blocks"),
)
def test_a_hidden_key_changes_no_bit(pattern, hidden):
    """And a visible one does, at the very edge: a window of 3 sees 4 keys."""
    q, k, v, _ = inputs_of(40, 40, 1)
    before = attention(q, k, v, causal=False, pattern=pattern)
    visible = pattern.allowed(False, range(40), range(40), torch.device("cpu")).view(40, 40)
    for key in range(40):
        values = v.clone()
        values[key] += 1
        changed = (attention(q, k, values, causal=False, pattern=pattern) != before).any(-1).view(40)
        assert torch.equal(changed, visible[:, key]), key
        assert not any(changed[row] for row in range(40) if hidden(row, key))


def test_a_window_of_w_has_w_and_its_own():
    q, k, v = torch.zeros(9, 1, 1, 4), torch.zeros(9, 1, 1, 4), torch.zeros(9, 1, 1, 4)
    for width in (0, 1, 3):
        _, lse = attention_with_lse(q, k, v, causal=True, pattern=Pattern((width, 0)))
        assert lse.exp().round().int().flatten().tolist() == [min(row, width) + 1 for row in range(9)]


def test_sinks_of_documents_are_those_of_each():
    q, k, v = torch.zeros(12, 1, 1, 4), torch.zeros(12, 1, 1, 4), torch.zeros(12, 1, 1, 4)
    ids = torch.tensor([[0] * 5 + [1] * 7])
    call = {"causal": True, "document_ids": ids, "pattern": Pattern((1, 0), sinks=2)}
    _, lse = attention_with_lse(q, k, v, **call)
    assert lse.exp().round().int().flatten().tolist() == [1, 2, 3, 4, 4, 1, 2, 3, 4, 4, 4, 4]
    with pytest.raises(ValueError, match="`pattern` must have no sinks"):
        attention_with_lse(q, k, v, part=Part(0, 0), **call)


def test_a_layout_that_is_too_small_is_refused():
    q, k, v, _ = inputs_of(40, 40)
    for layout in (layout_of(16, N, 32), layout_of(16, N - 1, 40), BlockLayout(torch.ones(1, 3, 2) > 0, 16)):
        with pytest.raises(ValueError, match="`layout` must be"):
            attention(q, k, v, causal=False, pattern=Pattern(layout=layout))
    with pytest.raises(ValueError, match="40 places"):
        attention(q[:1], k, v, causal=False, pattern=Pattern(layout=layout_of(16, N, 32)), part=Part(0, 0))


def test_no_threads_or_neighbours_change_a_bit():
    """A row's sum has one order, whatever else is computed."""
    inputs = inputs_of(200, 200)
    pattern = Pattern((50, 0), sinks=3, layout=layout_of(32, N, 200, 0.7))
    before, made = torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            made.append(both_passes(attention_native_cpu, *inputs, AttentionCall(0.3, pattern=pattern)))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(*pair) for pair in zip(*made, strict=True))


def test_offsets_beyond_two_billion_elements():
    """Rows so far apart that the last ones are behind 2^31 elements; the memory between is never touched."""
    s, distance = 1030, 1 << 21
    q, k, v = (torch.randn(s, 1, 1, 8).bfloat16() for _ in range(3))
    far = torch.empty(s, distance, dtype=torch.bfloat16)[:, :8].unsqueeze(1).unsqueeze(1)
    assert far.stride(0) * (s - 1) > 1 << 31
    for pattern in (CAUSAL, Pattern((39, 0), sinks=1)):
        near = attention(q, k, v, causal=False, pattern=pattern)
        for which in range(3):
            tensors = [q, k, v]
            tensors[which] = far.copy_(tensors[which])
            assert torch.equal(attention(*tensors, causal=False, pattern=pattern), near)
