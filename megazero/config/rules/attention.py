"""Rules about the keys that attention sees: windows, and blocks that divide the sequence."""

from __future__ import annotations

from collections.abc import Callable

from megazero.config.fields import paths
from megazero.config.rules.rule import Case, rule
from megazero.config.tree.model import ModelConfig
from megazero.config.tree.option import is_interval

_MODEL = paths.model

_DEFAULT_SEED = ModelConfig.model_fields["sparse_seed"].default


def _is_whole(pattern: tuple[int, ...] | None, layers: int) -> bool:
    """Whether a pattern is an interval, or has a 0 or 1 for each layer."""
    return pattern is None or is_interval(pattern) or (len(pattern) == layers and set(pattern) <= {0, 1})


def _items(pattern: tuple[int, ...] | None) -> str:
    return f"it has {len(pattern or ())} items"


@rule((_MODEL.num_query_groups, _MODEL.multi_latent_attention), "leave one of the two out")
def latent_heads_have_own_keys(case: Case) -> bool:
    """`num_query_groups` must be left out with `multi_latent_attention`, where each head has its own keys"""
    return not case.model.multi_latent_attention or case.model.kv_heads == case.model.num_attention_heads


@rule(
    (_MODEL.window_attn_skip_freq, _MODEL.num_layers),
    "correct it; an interval of 1 leaves no layer a window: leave `--window-size` out",
    detail=lambda c: _items(c.model.window_attn_skip_freq),
)
def window_pattern_is_whole(case: Case) -> bool:
    """`window_attn_skip_freq` must be one number above 1, or a 0 or 1 for each layer"""
    return _is_whole(case.model.window_attn_skip_freq, case.model.num_layers)


@rule(
    (_MODEL.no_rope_freq, _MODEL.num_layers),
    "correct it; an interval of 1 leaves no layer rotary positions: leave the rotation out",
    detail=lambda c: _items(c.model.no_rope_freq),
)
def rotation_pattern_is_whole(case: Case) -> bool:
    """`no_rope_freq` must be one number above 1, or a 0 or 1 for each layer"""
    return _is_whole(case.model.no_rope_freq, case.model.num_layers)


@rule((_MODEL.window_size, _MODEL.family), "give `--window-size L,0`")
def window_of_the_past(case: Case) -> bool:
    """the second number of `window_size` must be 0 or -1 for a gpt, whose tokens see no later ones"""
    model = case.model
    return model.family != "gpt" or model.window_size is None or model.window_size[1] in (-1, 0)


@rule(
    (_MODEL.window_size, _MODEL.max_position_embeddings, _MODEL.seq_length),
    "make the window smaller, or raise `--max-position-embeddings`",
    detail=lambda c: f"there are {c.model.positions:,} positions",
)
def window_within_positions(case: Case) -> bool:
    """each side of `window_size` must be below `max_position_embeddings`, or `seq_length` if that is not
    given, as no token is farther from another"""
    return max(case.model.window_size or (-1,)) < case.model.positions


@rule(
    (_MODEL.window_size, _MODEL.window_attn_skip_freq, _MODEL.num_layers),
    "give a number other than -1, or leave `--window-size` out",
)
def some_layer_has_a_window(case: Case) -> bool:
    """`window_size` must limit a side, in at least one layer"""
    return (
        case.model.window_size is None
        or case.model.has_windows
        or not window_pattern_is_whole.holds(case)
        or not window_of_the_past.holds(case)
    )


def _sparse(*modes: str) -> Callable[[Case], bool]:
    """Make the predicate on models whose attention has one of these modes, or any but dense."""
    return lambda case: case.model.sparse_attention in modes if modes else case.model.is_sparse


def _length_in_blocks(case: Case) -> str:
    return f"the longest sequence has {case.model.sparse_blocks} blocks"


def _draws(model: ModelConfig) -> bool:
    return model.sparse_attention in ("variable", "bigbird") and model.sparse_num_random_blocks > 0


@rule(
    (_MODEL.sparse_block, _MODEL.seq_length, _MODEL.max_position_embeddings),
    "choose a block that does, or leave out `--sparse-attention`",
    where=_sparse(),
)
def sparse_blocks_divide_sequence(case: Case) -> bool:
    """`sparse_block` must divide `seq_length` and `max_position_embeddings`"""
    model = case.model
    return model.seq_length % model.sparse_block == 0 and model.positions % model.sparse_block == 0


@rule((_MODEL.sparse_direction, _MODEL.family), "correct it or leave it out")
def sparse_direction_of_model(case: Case) -> bool:
    """`sparse_direction` must be unidirectional for GPT and bidirectional for BERT"""
    direction = "bidirectional" if case.model.family == "bert" else "unidirectional"
    return case.model.sparse_direction in (None, direction)


@rule(
    (_MODEL.sparse_num_global_blocks, _MODEL.sparse_num_local_blocks, _MODEL.sparse_block),
    "choose fewer global blocks",
    where=_sparse("fixed", "bigbird"),
    detail=_length_in_blocks,
)
def sparse_global_blocks_fit(case: Case) -> bool:
    """`sparse_num_global_blocks` must be at most the number of blocks and, with fixed, divide
    `sparse_num_local_blocks`"""
    model = case.model
    count = model.sparse_num_global_blocks
    fits = count <= model.sparse_blocks
    return fits and (model.sparse_attention != "fixed" or model.sparse_num_local_blocks % count == 0)


@rule(
    (
        _MODEL.sparse_num_different_global_patterns,
        _MODEL.sparse_num_local_blocks,
        _MODEL.sparse_num_global_blocks,
    ),
    "choose fewer patterns or wider windows",
    where=_sparse("fixed"),
)
def sparse_patterns_fit(case: Case) -> bool:
    """`sparse_num_different_global_patterns` must be at most `sparse_num_local_blocks` /
    `sparse_num_global_blocks`"""
    model = case.model
    return model.sparse_num_different_global_patterns <= max(
        1, model.sparse_num_local_blocks // model.sparse_num_global_blocks
    )


@rule(
    (
        _MODEL.sparse_different_layout_per_head,
        _MODEL.sparse_num_different_global_patterns,
        _MODEL.sparse_num_random_blocks,
        _MODEL.sparse_attention,
    ),
    "set `--sparse-num-different-global-patterns` or `--sparse-num-random-blocks`, or leave out "
    "`--sparse-different-layout-per-head`",
    where=_sparse(),
)
def sparse_layouts_differ(case: Case) -> bool:
    """heads must have something to differ in with `sparse_different_layout_per_head`: several patterns with
    fixed, random blocks with variable and bigbird"""
    model = case.model
    return (
        not model.sparse_different_layout_per_head
        or model.sparse_num_different_global_patterns > 1
        or _draws(model)
    )


@rule(
    (_MODEL.sparse_num_random_blocks, _MODEL.sparse_block),
    "draw fewer",
    where=_sparse("variable", "bigbird"),
    detail=_length_in_blocks,
)
def sparse_random_blocks_fit(case: Case) -> bool:
    """`sparse_num_random_blocks` must be at most the number of blocks"""
    model = case.model
    return model.sparse_num_random_blocks <= model.sparse_blocks


@rule(
    (_MODEL.sparse_seed, _MODEL.sparse_num_random_blocks),
    "set `--sparse-num-random-blocks` or leave out `--sparse-seed`",
    where=_sparse(),
)
def sparse_seed_draws(case: Case) -> bool:
    """`sparse_seed` must have random blocks to draw"""
    model = case.model
    return model.sparse_seed == _DEFAULT_SEED or _draws(model)


@rule(
    (_MODEL.sparse_global_block_indices, _MODEL.sparse_global_block_end_indices, _MODEL.sparse_block),
    "correct the numbers, which count from 0",
    where=_sparse("variable", "bslongformer"),
    detail=_length_in_blocks,
)
def sparse_global_runs_exist(case: Case) -> bool:
    """`sparse_global_block_indices` must be numbers of blocks, and `sparse_global_block_end_indices` as many
    numbers, each above the one that it belongs to"""
    model = case.model
    starts, ends = model.sparse_global_block_indices, model.sparse_global_block_end_indices
    in_order = not ends or (
        len(ends) == len(starts) and all(a < b for a, b in zip(starts, ends, strict=True))
    )
    return in_order and max(starts) < model.sparse_blocks


@rule(
    (_MODEL.sparse_num_sliding_window_blocks, _MODEL.sparse_block),
    "choose a narrower window or smaller blocks",
    where=_sparse("bigbird", "bslongformer", "local_sliding_window"),
    detail=_length_in_blocks,
)
def sparse_window_fits(case: Case) -> bool:
    """`sparse_num_sliding_window_blocks` must be at most the number of blocks"""
    model = case.model
    return model.sparse_num_sliding_window_blocks <= model.sparse_blocks
