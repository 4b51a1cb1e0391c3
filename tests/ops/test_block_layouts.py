"""Layouts of block-sparse attention: DeepSpeed's literals, and what is drawn."""

import torch

from megazero.ops.block_layouts import (
    bigbird,
    bslongformer,
    dense,
    fixed,
    local_sliding_window,
    random_blocks,
    variable,
)
from tests.tables import over_table

BAND = "11111111 11100000 11110000 10111000 10011100 10001110 10000111 10000011"
LOWER = "10000000 11000000 11100000 10110000 10011000 10001100 10000110 10000011"
LITERALS = {
    "dense": (dense(3), "111 111 111"),
    "fixed": (fixed(8), " ".join(["11110001"] * 4 + ["00011111"] * 4)),
    "fixed, short window": (fixed(6), " ".join(["111101"] * 4 + ["000111"] * 2)),
    "fixed, horizontal": (
        fixed(8, horizontal=True),
        " ".join(["11110001"] * 3 + ["11111111"] + ["00011111"] * 3 + ["11111111"]),
    ),
    "fixed, causal": (
        fixed(8, causal=True),
        "10000000 11000000 11100000 11110000 00011000 00011100 00011110 00011111",
    ),
    "fixed, causal, two global": (
        fixed(8, causal=True, globals_=2),
        "10000000 11000000 11110000 11110000 00111000 00111100 00111111 00111111",
    ),
    "variable": (variable(8), " ".join(["11110000"] * 4 + ["10001111"] * 4)),
    "variable, causal": (
        variable(8, causal=True, windows=(1, 2, 3)),
        "10000000 11000000 11100000 10010000 10011000 10011100 10000010 10000011",
    ),
    "variable, runs": (
        variable(8, windows=(2,), starts=(1, 6), ends=(3, 7), horizontal=True),
        "11100010 11111111 11111111 01110010 01101110 01101110 11111111 01100011",
    ),
    "bigbird": (bigbird(8, random=0), BAND),
    "bigbird, causal": (bigbird(8, random=0, causal=True), LOWER),
    "bslongformer": (bslongformer(8), BAND),
    "bslongformer, causal": (bslongformer(8, causal=True), LOWER),
    "bslongformer, runs": (
        bslongformer(6, window=1, starts=(2,), ends=(4,)),
        "101100 011100 111111 111111 001110 001101",
    ),
    "local window": (
        local_sliding_window(8),
        "10000000 11000000 01100000 00110000 00011000 00001100 00000110 00000011",
    ),
    "local window, both ways, even": (
        local_sliding_window(5, window=2, causal=False),
        "11000 11100 01110 00111 00011",
    ),
}


def picture(layout):
    """The rows of the first head's layout."""
    return " ".join("".join(str(int(cell)) for cell in row) for row in layout[0])


@over_table("name", LITERALS)
def test_literal_layouts(name):
    layout, expected = LITERALS[name]
    assert layout.dtype == torch.bool
    assert picture(layout) == expected


def test_heads_take_patterns_in_turn():
    layout = fixed(8, heads=6, patterns=4)
    global_columns = [[j for j in range(8) if layout[h, :, j].all()] for h in range(6)]
    assert global_columns == [[3, 7], [2, 6], [1, 5], [0, 4], [3, 7], [2, 6]]


@over_table(
    ("blocks", "differing"), [(6, 4), (10, 8), (11, 8)], ids=["96 tokens", "160 tokens", "176 tokens"]
)
def test_a_crop_differs_from_a_layout_of_that_length_in_a_short_window(blocks, differing):
    """Blocks of 16 tokens; the model's layouts are crops (`layers/patterns.py`)."""
    crop, own = fixed(128)[:, :blocks, :blocks], fixed(blocks)
    assert int((crop != own).sum()) == differing
    assert picture(crop).split()[-1] == "0" * 3 + "1" + "0001" * ((blocks - 4) // 4) + "1" * (blocks % 4)
    # A causal short window sees its global blocks as its own.
    assert torch.equal(fixed(128, causal=True)[:, :blocks, :blocks], fixed(blocks, causal=True))


@over_table(
    "make",
    [
        lambda n: variable(n, windows=(1, 2, 3), starts=(0, 5)),
        lambda n: bigbird(n, random=0),
        lambda n: bslongformer(n, starts=(0, 5)),
        lambda n: local_sliding_window(n),
    ],
)
def test_other_layouts_are_their_crops(make):
    for blocks in (6, 10, 11):
        assert torch.equal(make(128)[:, :blocks, :blocks], make(blocks))


def test_random_blocks_are_as_many_as_asked_and_differ_by_head_row_and_key():
    drawn = random_blocks(32, 4, 3, False, 7)
    assert (drawn.sum(-1) == 3).all()
    assert len({tuple(row) for head in drawn.tolist() for row in head}) > 100
    assert not torch.equal(drawn, random_blocks(32, 4, 3, False, 8))
    assert torch.equal(drawn[:2], random_blocks(32, 2, 3, False, 7))


def test_causal_random_blocks_are_earlier_ones_and_all_of_them_where_there_are_few():
    """DeepSpeed fails in the first row, which has one block to draw two from."""
    drawn = random_blocks(16, 2, 2, True, 7)
    assert torch.equal(drawn, drawn.tril())
    assert drawn.sum(-1).tolist() == [[1] + [2] * 15] * 2
    assert not variable(16, random=2, causal=True, key=7).triu(1).any()


def test_random_blocks_are_drawn_evenly():
    counts = random_blocks(16, 400, 2, False, 11).sum((0, 1))
    assert counts.sum() == 16 * 400 * 2
    assert (counts - 800).abs().max() < 5 * (16 * 400 * 2 / 16 * 15 / 16) ** 0.5
