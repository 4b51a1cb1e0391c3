"""Attention over pages is attention over whole sequences, however these are cut into steps."""

from __future__ import annotations

import pytest
import torch

from megazero.layers.inputs import Attends, LayerInputs
from megazero.layers.rows import Rows
from megazero.mpu.solo_group import SoloGroup
from megazero.ops.attention import AttentionCall, Bias, Pattern, Slopes, Softcap, attend
from megazero.ops.native import available
from megazero.serving.page_buffers import PageBuffers, Ragged

LENGTHS = (1, 37, 150)


def heads(length: int, n: int, d: int, seed: int) -> torch.Tensor:
    """[length, 1, n, d]"""
    return torch.randn(length, 1, n, d, generator=torch.Generator().manual_seed(seed))


def steps(lengths: tuple[int, ...], page: int) -> list[Ragged]:
    """Pieces of 23 rows, then single ones, of sequences whose pages lie anywhere."""
    free = list(range(100))[::-1]
    tables = [tuple(free.pop() for _ in range(-(-length // page))) for length in lengths]
    done, made = [0] * len(lengths), []
    while any(a < b for a, b in zip(done, lengths, strict=True)):
        live = [i for i, length in enumerate(lengths) if done[i] < length]
        counts = [min(23 if done[i] < 92 else 1, lengths[i] - done[i]) for i in live]
        past = tuple(done[i] for i in live)
        made.append(Ragged(tuple(counts), past, tuple(tables[i] for i in live)))
        for i, count in zip(live, counts, strict=True):
            done[i] += count
    return made


CASES: dict[str, tuple[Pattern, Bias | None, bool]] = {
    "plain": (Pattern(), None, False),
    "window": (Pattern((19, 0)), None, False),
    "sinks": (Pattern((19, 0), sinks=3), None, False),
    "slopes": (Pattern(), Slopes(torch.tensor([0.5, 0.25, 0.125, 0.0625])), False),
    "softcap": (Pattern(), Softcap(2.0), False),
    "offset": (Pattern(), None, True),
}


@pytest.mark.parametrize("page", [16, 32, 64])
@pytest.mark.parametrize("case", CASES)
def test_any_steps_give_attention_over_the_whole_sequence(case, page):
    pattern, bias, offsets = CASES[case]
    n, g, d = 4, 2, 24
    offset = torch.linspace(-1, 1, n) if offsets else None
    attends = Attends(3, True, pattern=pattern)
    whole = [(heads(t, n, d, t), heads(t, g, d, t + 1), heads(t, g, d, t + 2)) for t in LENGTHS]
    call = AttentionCall(d**-0.5, bias=bias, pattern=pattern.causally(True))
    expected = [attend(q, k, v, call, offset) for q, k, v in whole]
    buffers, parts = PageBuffers(100, page), [[] for _ in LENGTHS]
    for ragged in steps(LENGTHS, page):
        owners = [LENGTHS.index(t) for t in LENGTHS]
        live = [i for i in owners if sum(map(len, parts[i])) < LENGTHS[i]]
        rows = [slice(p, p + c) for p, c in zip(ragged.past, ragged.counts, strict=True)]
        q, k, v = (
            torch.cat([whole[i][part][row] for i, row in zip(live, rows, strict=True)]) for part in range(3)
        )
        core = buffers.core(ragged, SoloGroup())
        out = core(q, k, v, LayerInputs(Rows(range(len(q)))), attends, bias, offset)
        for i, part in zip(live, out.split(ragged.counts), strict=True):
            parts[i].append(part)
    for one, part in zip(expected, parts, strict=True):
        got = torch.cat(part)
        assert (
            torch.equal(got, one)
            if case != "softcap" and available()
            else torch.allclose(got, one, atol=1e-6)
        )
