"""Patterns: literal masks, and calls with places of their own are slices of the whole."""

import pytest
import torch

from megazero.ops.attention import ALL, CAUSAL, BlockLayout, Part, Pattern, Slopes, attention
from tests.ops.lse import attention_with_lse

CPU = torch.device("cpu")


def picture(mask):
    return ["".join("1" if cell else "0" for cell in row) for row in mask.tolist()]


def seen(pattern, causal, queries=range(5), keys=range(5)):
    return picture(pattern.allowed(causal, queries, keys, CPU))


def test_literal_masks():
    assert seen(ALL, True) == ["10000", "11000", "11100", "11110", "11111"]
    assert seen(Pattern((2, 0)), True) == ["10000", "11000", "11100", "01110", "00111"]
    assert seen(Pattern((1, 1)), False) == ["11000", "11100", "01110", "00111", "00011"]
    assert seen(Pattern((1, 0), sinks=1), True) == ["10000", "11000", "11100", "10110", "10011"]
    assert seen(Pattern(prefix=3), True) == ["11100", "11100", "11100", "11110", "11111"]
    layout = BlockLayout(torch.tensor([[[True, False], [True, True]]]), 3)
    assert picture(Pattern(layout=layout).allowed(False, range(5), range(5), CPU)[0]) == [
        *["11100"] * 3,
        *["11111"] * 2,
    ]
    assert ALL.allowed(False, range(5), range(5), CPU) is None


@pytest.mark.parametrize("pattern", [ALL, Pattern((3, 0)), Pattern((2, 0), sinks=2), Pattern(prefix=6)])
def test_a_call_with_places_is_a_slice_of_the_whole(pattern):
    torch.manual_seed(0)
    q, k, v = (torch.randn(12, 2, 4, 8) for _ in range(3))
    slopes = Slopes(torch.tensor([0.5, 0.25, 0.125, 0.0625]))
    ids = torch.tensor([[0] * 12, [0] * 5 + [1] * 7])

    def given(keys):
        return {} if pattern.sinks else {"document_ids": ids[:, keys]}

    def part(keys):
        place = Part(4, keys.start, None if pattern.sinks else ids[:, 4:8])
        return attention_with_lse(
            q[4:8], k[keys], v[keys], causal=True, pattern=pattern, bias=slopes, part=place, **given(keys)
        )

    whole = attention(q, k, v, causal=True, pattern=pattern, bias=slopes, **given(slice(0, 12)))
    (out1, lse1), (out2, lse2) = part(slice(0, 5)), part(slice(5, 12))
    weights = torch.softmax(torch.stack([lse1, lse2]), 0).permute(0, 3, 1, 2).unsqueeze(-1)
    merged = weights[0] * out1.view(4, 2, 4, 8) + weights[1] * out2.view(4, 2, 4, 8)
    assert torch.allclose(merged.flatten(2), whole[4:8], atol=1e-6)


def test_kernels_of_windows_are_told_what_is_more_than_one():
    blocks = BlockLayout(torch.ones(1, 1, 1, dtype=torch.bool), 16)
    assert not any(pattern.special for pattern in (ALL, CAUSAL, Pattern((3, 0))))
    more = Pattern((3, 0), sinks=1), Pattern((3, 0), prefix=1), Pattern(layout=blocks)
    assert all(pattern.special for pattern in more)
