"""Rules about random-LTD and progressive layer dropping."""

from __future__ import annotations

from megazero.config.derive import sequence_multiple
from megazero.config.fields import paths
from megazero.config.pacing import pieces
from megazero.config.rules.rule import Case, rule

_MODEL, _PARALLEL, _SKIPPING = paths.model, paths.parallel, paths.skipping

_MIN = _SKIPPING.random_ltd_min_value
_MAX = _SKIPPING.random_ltd_max_value
_ROUNDED = _SKIPPING.random_ltd_seq_per_step
_TOTAL = _SKIPPING.random_ltd_total_layer_num


def _drops_tokens(case: Case) -> bool:
    return case.config.skipping.random_ltd


@rule((_MIN, _MAX, _MODEL.seq_length), "let layers see more tokens, up to all of them", where=_drops_tokens)
def random_ltd_grows(case: Case) -> bool:
    """`random_ltd_min_value` must be at most `random_ltd_max_value`, and `random_ltd_max_value`, which is
    `seq_length` if unset, at most `seq_length`"""
    skipping, length = case.config.skipping, case.model.seq_length
    return (skipping.random_ltd_min_value or 1) <= (skipping.random_ltd_max_value or length) <= length


@rule((_ROUNDED, _MIN, _MAX, _MODEL.seq_length), "raise `--random-ltd-seq-per-step`")
def random_ltd_changes_countable(case: Case) -> bool:
    """`random_ltd` must keep at most 100000 different numbers of tokens"""
    return not case.config.skipping.too_many_changes(case.model.seq_length)


@rule(
    (_SKIPPING.random_ltd_layer_id, _MODEL.num_layers),
    "name some of the model's layers",
    where=_drops_tokens,
)
def random_ltd_layers_exist(case: Case) -> bool:
    """`random_ltd_layer_id` must name layers from 0 to `num_layers` - 1, each once, and at least one; by
    default, these are all but the first and the last"""
    layers, depth = case.config.skipping.random_ltd_layer_id, case.model.num_layers
    return len(set(layers)) == len(layers) and max(layers) < depth if layers else depth > 2


@rule(
    (_SKIPPING.random_ltd_layer_num, _TOTAL, _SKIPPING.random_ltd_layer_id, _MODEL.num_layers),
    "correct or leave out the numbers",
    where=_drops_tokens,
)
def random_ltd_counts_fit(case: Case) -> bool:
    """`random_ltd_layer_num` must be the number of layers that drop tokens, and `random_ltd_total_layer_num`
    that of all"""
    skipping, depth = case.config.skipping, case.model.num_layers
    return skipping.random_ltd_total_layer_num in (None, depth) and (
        skipping.random_ltd_layer_num in (None, len(skipping.dropping_layers(depth)))
    )


@rule(
    (_ROUNDED, _MIN, _MAX, _PARALLEL.tensor_model_parallel_size, _PARALLEL.context_parallel_size),
    "set `--random-ltd-seq-per-step`, and the first and last number, to multiples of that number",
    detail=lambda c: f"each must be a multiple of {sequence_multiple(c.parallel)}",
)
def random_ltd_divides_over_ranks(case: Case) -> bool:
    """all numbers of tokens that `random_ltd` keeps must divide evenly over the ranks that share a
    sequence"""
    multiple, length = sequence_multiple(case.parallel), case.model.seq_length
    pacing = case.config.skipping.kept_tokens(length)
    return pacing is None or all(kept % multiple == 0 for _, kept in pieces(pacing) if kept < length)
