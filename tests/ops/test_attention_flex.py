"""FlexAttention's masks and tiles against the dense mask of a call, and its forward on a CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megazero.ops.attention import (
    ATTENTION,
    AttentionFacts,
    BiasKind,
    BlockLayout,
    Documents,
    MaskKind,
    Part,
    Pattern,
    Slopes,
    Softcap,
    table,
)
from megazero.ops.attention.call import AttentionCall
from megazero.ops.attention.flex import _FLEX, TILE, allows, attention_flex, tiles_of
from megazero.ops.attention.reference import attention_reference

CPU = torch.device("cpu")
N = 2


def layout_of(size: int, heads: int, places: int = 512) -> BlockLayout:
    drawn = torch.rand(heads, places // size, places // size, generator=torch.Generator().manual_seed(size))
    return BlockLayout(drawn < 0.4, size)


PATTERNS = {
    "causal": Pattern((-1, 0)),
    "sinks": Pattern((40, 0), sinks=5),
    "prefix": Pattern((-1, 0), prefix=150),
    "prefix, window, sinks": Pattern((60, 3), sinks=9, prefix=140),
    "blocks of 16": Pattern((-1, 0), layout=layout_of(16, N)),
    "blocks of 64": Pattern(layout=layout_of(64, 1)),
    "blocks of 128": Pattern(layout=layout_of(128, N)),
}
each_pattern = pytest.mark.parametrize("name", PATTERNS)


def calls_of(pattern: Pattern, s: int, t: int):
    """The pattern by itself, elsewhere in a sequence, with documents and a mask, with documents elsewhere."""
    plain = AttentionCall(0.3, pattern=pattern)
    yield plain
    yield replace(plain, part=Part(100, 30))
    ids = Documents(torch.stack((torch.arange(t) // 70, torch.arange(t) // 200)))
    yield replace(plain, documents=ids, mask=torch.rand(2, 1, 1, t) < 0.8)
    places = torch.arange(400)
    whole = Documents(torch.stack((places // 70, places // 190)))
    keys = slice(30, 30 + t)  # some of their documents begin before them
    part = Part(100, 30, whole.ids[:, 100 : 100 + s], whole.bounds[0][:, keys])
    yield replace(plain, documents=Documents(whole.ids[:, keys]), part=part)


def cases(name: str):
    for s, t in ((256, 256), (200, 333), (1, 140)):
        for call in calls_of(PATTERNS[name], s, t):
            q, k, v = (torch.randn(rows, 2, N, 8) for rows in (s, t, t))
            yield s, t, call, q, k, v


@each_pattern
def test_a_pair_is_allowed_as_the_dense_mask_says(name):
    for s, t, call, q, k, _ in cases(name):
        b, h, i, j = torch.meshgrid(*map(torch.arange, (2, N, s, t)), indexing="ij")
        true = call.allowed(q, k)
        true = torch.ones(s, t).tril() > 0 if true is None else true
        assert torch.equal(allows(call, s, t, CPU)(b, h, i, j), true.expand(2, N, s, t))


@each_pattern
def test_tiles_hold_all_that_is_allowed_and_full_ones_nothing_else(name):
    for s, t, call, q, k, _ in cases(name):
        mask = _FLEX.block_mask(call, s, t, CPU)
        assert mask.seq_lengths == (s, t)
        computed = mask.to_dense()[0].bool()
        allowed = call.allowed(q, k)
        allowed = (torch.ones(s, t).tril() > 0 if allowed is None else allowed).expand(2, N, s, t)
        padded = torch.zeros(2, N, -(-s // TILE) * TILE, -(-t // TILE) * TILE, dtype=torch.bool)
        padded[:, :, :s, :t] = allowed
        tiles = padded.unflatten(-1, (-1, TILE)).unflatten(2, (-1, TILE))
        some, every = tiles.any(-1).any(3).any(0), tiles.all(-1).all(3).all(0)
        full = torch.zeros_like(computed)
        counts, order = mask.full_kv_num_blocks[0], mask.full_kv_indices[0]
        for head, row in ((h, r) for h in range(len(full)) for r in range(full.shape[1])):
            full[head, row, order[head, row, : counts[head, row]].long()] = True
        assert not (some & ~computed).any()
        assert not (full & ~every).any()
        if call.documents is None:
            assert torch.equal(computed.expand_as(some), some)
            assert torch.equal(full.expand_as(every), every)


@each_pattern
@pytest.mark.parametrize("bias", [None, Slopes(torch.tensor([0.5, 0.01])), Softcap(0.7)], ids=str)
def test_forward_is_the_references(name, bias, monkeypatch):
    from torch.nn.attention.flex_attention import flex_attention  # takes seconds

    # torch's own way to run it without tracing each call, which takes most of the time.
    monkeypatch.setattr("torch.nn.attention.flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)

    def attend(q, *others, **settings):
        assert q.shape[-1] >= 16, "the compiled kernels refuse narrower heads"
        return flex_attention(q, *others, **settings)

    for _, _, call, q, k, v in cases(name):
        given = (q, k[:, :, :1], v[:, :, :1], replace(call, bias=bias))
        ours, _ = attention_flex(*given, attend=attend)
        torch.testing.assert_close(ours, attention_reference(*given)[0], rtol=1e-4, atol=1e-5)


def test_masks_are_made_once_and_by_pattern():
    """Of two layouts of one length, each call gets its own."""
    first, second = (Pattern(layout=layout_of(size, 1, 256)) for size in (16, 128))
    call = AttentionCall(0.3, pattern=first)
    assert _FLEX.block_mask(call, 256, 256, CPU) is _FLEX.block_mask(replace(call, scale=1.0), 256, 256, CPU)
    other = _FLEX.block_mask(replace(call, pattern=second), 256, 256, CPU)
    assert other is not _FLEX.block_mask(call, 256, 256, CPU)
    assert torch.equal(tiles_of(second, range(256), range(256), CPU)[1][0], second.layout.blocks[0])


def test_the_table_takes_it_where_our_kernels_know_too_little(monkeypatch):
    plain = {"dropout": False, "lse": False}
    rows = {row.name: row for row in ATTENTION.implementations}

    def facts(mask, **own):
        return AttentionFacts("cuda", torch.bfloat16, mask, **{**plain, **own})

    assert rows["cuda"].unmet(facts(MaskKind.PATTERN)) is not None
    for compiles in (False, True):
        monkeypatch.setattr(table, "flex_compiles", lambda: compiles)  # noqa: B023
        assert rows["flex"].serves(facts(MaskKind.PATTERN)) == compiles
        assert rows["flex"].serves(facts(MaskKind.CAUSAL, bias=BiasKind.SLOPES)) == compiles
        assert rows["flex"].serves(facts(MaskKind.CAUSAL, bias=BiasKind.SOFTCAP)) == compiles
    assert rows["flex"].unmet(facts(MaskKind.PATTERN, lse=True)) == "serves lse=False only"
    assert rows["flex"].unmet(facts(MaskKind.WINDOW)).startswith("pays with sinks")
