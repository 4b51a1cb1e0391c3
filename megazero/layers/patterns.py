"""The pattern of a layer's attention by the model's settings: the keys that a position may attend to."""

from __future__ import annotations

from torch import Tensor

from megazero.config.tree.model import ModelConfig
from megazero.mpu.group import Group
from megazero.mpu.rng import derive_key
from megazero.ops.attention import BlockLayout, Pattern
from megazero.ops.block_layouts import (
    bigbird,
    bslongformer,
    dense,
    fixed,
    local_sliding_window,
    variable,
)


def pattern_of(config: ModelConfig, layer: int, heads: Group, causal: bool) -> Pattern:
    """The pattern of this rank's heads in a layer.

    Args:
        config: the model's settings.
        layer: the layer's number.
        heads: the ranks that the heads are sliced over.
        causal: whether a position attends only to itself and earlier ones.
    """
    return Pattern(layout=_layout(config, layer, heads, causal))


def _layout(config: ModelConfig, layer: int, heads: Group, causal: bool) -> BlockLayout | None:
    """The blocks that this rank's heads see.

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


def seen_by_wanted(pattern: Pattern, wanted: Tensor, keys: int) -> Tensor | None:
    """bool [b, n or 1, r, t]: the t `keys` that the rows `wanted`, int64 [r, b], may attend to; None: all."""
    places = range(keys)
    seen = pattern.allowed(False, places, places, wanted.device)
    if seen is None:
        return None
    return seen.view(-1, keys, keys)[:, wanted.t()].transpose(0, 1)
