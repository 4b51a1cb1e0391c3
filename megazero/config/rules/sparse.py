"""Rules about block-sparse attention: blocks that divide the sequence, and layouts that fit it."""

from __future__ import annotations

from collections.abc import Callable

from megazero.config.fields import paths
from megazero.config.rules.rule import Case, Rule
from megazero.config.tree.model import ModelConfig

_MODEL = paths.model

_MODE, _BLOCK, _LENGTH = _MODEL.sparse_attention, _MODEL.sparse_block, _MODEL.seq_length
_POSITIONS, _FAMILY = _MODEL.max_position_embeddings, _MODEL.family
_GLOBAL, _RANDOM = _MODEL.sparse_num_global_blocks, _MODEL.sparse_num_random_blocks
_WINDOW, _SLIDING = _MODEL.sparse_num_local_blocks, _MODEL.sparse_num_sliding_window_blocks
_PATTERNS, _PER_HEAD = (_MODEL.sparse_num_different_global_patterns, _MODEL.sparse_different_layout_per_head)
_STARTS, _ENDS = _MODEL.sparse_global_block_indices, _MODEL.sparse_global_block_end_indices
_DIRECTION, _SEED = _MODEL.sparse_direction, _MODEL.sparse_seed
_DEFAULT_SEED = ModelConfig.model_fields["sparse_seed"].default


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
        (_BLOCK, _LENGTH, _POSITIONS),
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
        (_DIRECTION, _FAMILY),
        "`sparse_direction` must be unidirectional for GPT and bidirectional for BERT",
        "correct it or leave it out",
        lambda c: c.config.model.sparse_direction in (None, _direction(c.config.model)),
    ),
    Rule(
        "sparse_global_blocks_fit",
        (_GLOBAL, _WINDOW, _BLOCK),
        "`sparse_num_global_blocks` must be at most the number of blocks and, with fixed, divide "
        "`sparse_num_local_blocks`",
        "choose fewer global blocks",
        _sparse("fixed", "bigbird")(_global_fit),
        _length_in_blocks,
    ),
    Rule(
        "sparse_patterns_fit",
        (_PATTERNS, _WINDOW, _GLOBAL),
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
        (_PER_HEAD, _PATTERNS, _RANDOM, _MODE),
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
        (_RANDOM, _BLOCK),
        "`sparse_num_random_blocks` must be at most the number of blocks",
        "draw fewer",
        _sparse("variable", "bigbird")(lambda model: model.sparse_num_random_blocks <= model.sparse_blocks),
        _length_in_blocks,
    ),
    Rule(
        "sparse_seed_draws",
        (_SEED, _RANDOM),
        "`sparse_seed` must have random blocks to draw",
        "set `--sparse-num-random-blocks` or leave out `--sparse-seed`",
        _sparse()(lambda model: model.sparse_seed == _DEFAULT_SEED or _draws(model)),
    ),
    Rule(
        "sparse_global_runs_exist",
        (_STARTS, _ENDS, _BLOCK),
        "`sparse_global_block_indices` must be numbers of blocks, and `sparse_global_block_end_indices` as "
        "many numbers, each above the one that it belongs to",
        "correct the numbers, which count from 0",
        _sparse("variable", "bslongformer")(_runs_sound),
        _length_in_blocks,
    ),
    Rule(
        "sparse_window_fits",
        (_SLIDING, _BLOCK),
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
