"""Rules about the keys that attention sees: windows, and blocks that divide the sequence."""

from __future__ import annotations

from collections.abc import Callable

from megazero.config.fields import paths
from megazero.config.rules.rule import Case, Rule
from megazero.config.tree.model import ModelConfig
from megazero.config.tree.option import is_interval

_MODEL = paths.model

_DEFAULT_SEED = ModelConfig.model_fields["sparse_seed"].default


def _is_whole(model: ModelConfig, field: str = "window_attn_skip_freq") -> bool:
    pattern = getattr(model, field)
    if pattern is None or is_interval(pattern):
        return True
    return len(pattern) == model.num_layers and set(pattern) <= {0, 1}


def _whole_pattern(name: str, field: str, remedy: str) -> Rule:
    return Rule(
        name,
        (f"model.{field}", _MODEL.num_layers),
        f"`{field}` must be one number above 1, or a 0 or 1 for each layer",
        f"correct it; an interval of 1 leaves no layer {remedy}",
        lambda c: _is_whole(c.config.model, field),
        lambda c: f"it has {len(getattr(c.config.model, field) or ())} items",
    )


def _only_past(model: ModelConfig) -> bool:
    return model.family != "gpt" or model.window_size is None or model.window_size[1] in (-1, 0)


ATTENTION_RULES: tuple[Rule, ...] = (
    Rule(
        "latent_heads_have_own_keys",
        (_MODEL.num_query_groups, _MODEL.multi_latent_attention),
        "`num_query_groups` must be left out with `multi_latent_attention`, where each head has its own keys",
        "leave one of the two out",
        lambda c: (
            not c.config.model.multi_latent_attention
            or c.config.model.kv_heads == c.config.model.num_attention_heads
        ),
    ),
    _whole_pattern("window_pattern_is_whole", "window_attn_skip_freq", "a window: leave `--window-size` out"),
    _whole_pattern("rotation_pattern_is_whole", "no_rope_freq", "rotary positions: leave the rotation out"),
    Rule(
        "window_of_the_past",
        (_MODEL.window_size, _MODEL.family),
        "the second number of `window_size` must be 0 or -1 for a gpt, whose tokens see no later ones",
        "give `--window-size L,0`",
        lambda c: _only_past(c.config.model),
    ),
    Rule(
        "window_within_positions",
        (_MODEL.window_size, _MODEL.max_position_embeddings, _MODEL.seq_length),
        "each side of `window_size` must be below `max_position_embeddings`, or `seq_length` if that is not "
        "given, as no token is farther from another",
        "make the window smaller, or raise `--max-position-embeddings`",
        lambda c: max(c.config.model.window_size or (-1,)) < c.config.model.positions,
        lambda c: f"there are {c.config.model.positions:,} positions",
    ),
    Rule(
        "some_layer_has_a_window",
        (_MODEL.window_size, _MODEL.window_attn_skip_freq, _MODEL.num_layers),
        "`window_size` must limit a side, in at least one layer",
        "give a number other than -1, or leave `--window-size` out",
        lambda c: (
            c.config.model.window_size is None
            or not _is_whole(c.config.model)
            or not _only_past(c.config.model)
            or c.config.model.has_windows
        ),
    ),
)


def _sparse(*modes: str) -> Callable[[Callable[[ModelConfig], bool]], Callable[[Case], bool]]:
    """Make predicates on any case of those on models with these modes, or with any but dense attention."""

    def of(holds: Callable[[ModelConfig], bool]) -> Callable[[Case], bool]:
        def judge(case: Case) -> bool:
            model = case.config.model
            counts = model.sparse_attention in modes if modes else model.is_sparse
            return not counts or holds(model)

        return judge

    return of


def _length_in_blocks(case: Case) -> str:
    return f"the longest sequence has {case.config.model.sparse_blocks} blocks"


def _draws(model: ModelConfig) -> bool:
    return model.sparse_attention in ("variable", "bigbird") and model.sparse_num_random_blocks > 0


def _runs_sound(model: ModelConfig) -> bool:
    starts, ends = model.sparse_global_block_indices, model.sparse_global_block_end_indices
    in_order = not ends or (
        len(ends) == len(starts) and all(a < b for a, b in zip(starts, ends, strict=True))
    )
    return in_order and max(starts) < model.sparse_blocks


def _global_fit(model: ModelConfig) -> bool:
    count = model.sparse_num_global_blocks
    fits = count <= model.sparse_blocks
    return fits and (model.sparse_attention != "fixed" or model.sparse_num_local_blocks % count == 0)


SPARSE_RULES: tuple[Rule, ...] = (
    Rule(
        "sparse_blocks_divide_sequence",
        (_MODEL.sparse_block, _MODEL.seq_length, _MODEL.max_position_embeddings),
        "`sparse_block` must divide `seq_length` and `max_position_embeddings`",
        "choose a block that does, or leave out `--sparse-attention`",
        _sparse()(
            lambda model: (
                model.seq_length % model.sparse_block == 0 and model.positions % model.sparse_block == 0
            )
        ),
    ),
    Rule(
        "sparse_direction_of_model",
        (_MODEL.sparse_direction, _MODEL.family),
        "`sparse_direction` must be unidirectional for GPT and bidirectional for BERT",
        "correct it or leave it out",
        lambda c: c.config.model.sparse_direction in (None, _direction(c.config.model)),
    ),
    Rule(
        "sparse_global_blocks_fit",
        (_MODEL.sparse_num_global_blocks, _MODEL.sparse_num_local_blocks, _MODEL.sparse_block),
        "`sparse_num_global_blocks` must be at most the number of blocks and, with fixed, divide "
        "`sparse_num_local_blocks`",
        "choose fewer global blocks",
        _sparse("fixed", "bigbird")(_global_fit),
        _length_in_blocks,
    ),
    Rule(
        "sparse_patterns_fit",
        (
            _MODEL.sparse_num_different_global_patterns,
            _MODEL.sparse_num_local_blocks,
            _MODEL.sparse_num_global_blocks,
        ),
        "`sparse_num_different_global_patterns` must be at most `sparse_num_local_blocks` / "
        "`sparse_num_global_blocks`",
        "choose fewer patterns or wider windows",
        _sparse("fixed")(
            lambda model: (
                model.sparse_num_different_global_patterns
                <= max(1, model.sparse_num_local_blocks // model.sparse_num_global_blocks)
            )
        ),
    ),
    Rule(
        "sparse_layouts_differ",
        (
            _MODEL.sparse_different_layout_per_head,
            _MODEL.sparse_num_different_global_patterns,
            _MODEL.sparse_num_random_blocks,
            _MODEL.sparse_attention,
        ),
        "heads must have something to differ in with `sparse_different_layout_per_head`: several patterns "
        "with fixed, random blocks with variable and bigbird",
        "set `--sparse-num-different-global-patterns` or `--sparse-num-random-blocks`, or leave out "
        "`--sparse-different-layout-per-head`",
        _sparse()(
            lambda model: (
                not model.sparse_different_layout_per_head
                or model.sparse_num_different_global_patterns > 1
                or _draws(model)
            )
        ),
    ),
    Rule(
        "sparse_random_blocks_fit",
        (_MODEL.sparse_num_random_blocks, _MODEL.sparse_block),
        "`sparse_num_random_blocks` must be at most the number of blocks",
        "draw fewer",
        _sparse("variable", "bigbird")(lambda model: model.sparse_num_random_blocks <= model.sparse_blocks),
        _length_in_blocks,
    ),
    Rule(
        "sparse_seed_draws",
        (_MODEL.sparse_seed, _MODEL.sparse_num_random_blocks),
        "`sparse_seed` must have random blocks to draw",
        "set `--sparse-num-random-blocks` or leave out `--sparse-seed`",
        _sparse()(lambda model: model.sparse_seed == _DEFAULT_SEED or _draws(model)),
    ),
    Rule(
        "sparse_global_runs_exist",
        (_MODEL.sparse_global_block_indices, _MODEL.sparse_global_block_end_indices, _MODEL.sparse_block),
        "`sparse_global_block_indices` must be numbers of blocks, and `sparse_global_block_end_indices` as "
        "many numbers, each above the one that it belongs to",
        "correct the numbers, which count from 0",
        _sparse("variable", "bslongformer")(_runs_sound),
        _length_in_blocks,
    ),
    Rule(
        "sparse_window_fits",
        (_MODEL.sparse_num_sliding_window_blocks, _MODEL.sparse_block),
        "`sparse_num_sliding_window_blocks` must be at most the number of blocks",
        "choose a narrower window or smaller blocks",
        _sparse("bigbird", "bslongformer", "local_sliding_window")(
            lambda model: model.sparse_num_sliding_window_blocks <= model.sparse_blocks
        ),
        _length_in_blocks,
    ),
)


def _direction(model: ModelConfig) -> str:
    return "bidirectional" if model.family == "bert" else "unidirectional"
