"""The blocks of positions that see each other in a layer, by the settings of block-sparse attention."""

from __future__ import annotations

from torch import Tensor

from megazero.config.tree.model import ModelConfig
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


def own_layout(config: ModelConfig, layer: int, heads: Group, causal: bool) -> BlockLayout | None:
    """The blocks that this rank's heads see; None if they see all.

    They are those of the longest sequence that the model can be given; shorter ones are its beginning. What a
    token attends to is then the same in a curriculum, in generation and at full length.
    """
    if not config.is_sparse:
        return None
    blocks = layout_of(config, layer, causal)
    if len(blocks) > 1:  # heads differ, each by its number among all of them
        count = len(blocks) // heads.size
        blocks = blocks[heads.rank * count :][:count].clone()
    return BlockLayout(blocks, config.sparse_block)


def layout_of(config: ModelConfig, layer: int, causal: bool) -> Tensor:
    """bool [n or 1, N, N]: the blocks that the n heads of a layer see in a longest sequence of N blocks."""
    blocks = config.sparse_blocks
    heads = config.num_attention_heads if config.sparse_different_layout_per_head else 1
    key = derive_key(config.sparse_seed, "sparse_attention", layer)
    starts, ends = config.sparse_global_block_indices, config.sparse_global_block_end_indices or None
    sliding = config.sparse_num_sliding_window_blocks
    match config.sparse_attention:
        case "fixed":
            return fixed(
                blocks,
                heads=heads,
                local=config.sparse_num_local_blocks,
                globals_=config.sparse_num_global_blocks,
                patterns=config.sparse_num_different_global_patterns,
                horizontal=config.sparse_horizontal_global_attention,
                causal=causal,
            )
        case "variable":
            return variable(
                blocks,
                heads=heads,
                random=config.sparse_num_random_blocks,
                windows=config.sparse_local_window_blocks,
                starts=starts,
                ends=ends,
                horizontal=config.sparse_horizontal_global_attention,
                causal=causal,
                key=key,
            )
        case "bigbird":
            return bigbird(
                blocks,
                heads=heads,
                random=config.sparse_num_random_blocks,
                window=sliding,
                globals_=config.sparse_num_global_blocks,
                causal=causal,
                key=key,
            )
        case "bslongformer":
            return bslongformer(blocks, window=sliding, starts=starts, ends=ends, causal=causal)
        case "local_sliding_window":
            return local_sliding_window(blocks, window=sliding, causal=causal)
        case _:
            return dense(blocks)
