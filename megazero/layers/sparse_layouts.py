"""The blocks of positions that see each other in a layer, as block-sparse attention chooses them."""

from __future__ import annotations

from torch import Tensor

from megazero.mpu.group import Group
from megazero.mpu.rng import derive_key
from megazero.ops.attention import BlockLayout
from megazero.ops.block_layouts import (
    bigbird,
    bslongformer,
    dense,
    fixed,
    local_sliding_window,
    variable,
)
from megazero.spec.parts import SparseSpec


def own_layout(spec: SparseSpec, layer: int, heads: Group, *, causal: bool) -> BlockLayout:
    """The blocks that this rank's heads see.

    They are the blocks of the longest sequence; a shorter sequence uses the beginning. So a token attends to
    the same keys in a curriculum, in generation and at full length.
    """
    blocks = layout_of(spec, layer, causal=causal)
    if len(blocks) > 1:  # heads differ, each by its number among all of them
        count = len(blocks) // heads.size
        blocks = blocks[heads.rank * count :][:count].clone()
    return BlockLayout(blocks, spec.block)


def layout_of(spec: SparseSpec, layer: int, *, causal: bool) -> Tensor:
    """bool [n or 1, N, N]: the blocks that the n heads of a layer see in a longest sequence of N blocks."""
    blocks, heads = spec.blocks, spec.heads
    key = derive_key(spec.seed, "sparse_attention", layer)
    starts, ends, sliding = spec.starts, spec.ends, spec.sliding
    match spec.kind:
        case "fixed":
            return fixed(
                blocks,
                heads=heads,
                local=spec.local,
                globals_=spec.globals_,
                patterns=spec.patterns,
                horizontal=spec.horizontal,
                causal=causal,
            )
        case "variable":
            return variable(
                blocks,
                heads=heads,
                random=spec.random,
                windows=spec.windows,
                starts=starts,
                ends=ends,
                horizontal=spec.horizontal,
                causal=causal,
                key=key,
            )
        case "bigbird":
            return bigbird(
                blocks,
                heads=heads,
                random=spec.random,
                window=sliding,
                globals_=spec.globals_,
                causal=causal,
                key=key,
            )
        case "bslongformer":
            return bslongformer(blocks, window=sliding, starts=starts, ends=ends, causal=causal)
        case "local_sliding_window":
            return local_sliding_window(blocks, window=sliding, causal=causal)
        case _:
            return dense(blocks)
