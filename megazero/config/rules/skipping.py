"""Rules about random-LTD and progressive layer dropping."""

from __future__ import annotations

from megazero.config.derive import sequence_multiple
from megazero.config.fields import paths
from megazero.config.pacing import MOST_CHANGES, pieces
from megazero.config.rules.rule import Case, Rule
from megazero.config.tree.skipping import SkippingConfig

_MODEL, _PARALLEL, _SKIPPING = paths.model, paths.parallel, paths.skipping

_MIN = _SKIPPING.random_ltd_min_value
_MAX = _SKIPPING.random_ltd_max_value
_ROUNDED = _SKIPPING.random_ltd_seq_per_step
_TOTAL = _SKIPPING.random_ltd_total_layer_num


def _settings(case: Case) -> SkippingConfig:
    return case.config.skipping


def _layers(case: Case) -> tuple[int, ...] | range:
    return _settings(case).dropping_layers(case.config.model.num_layers)


def _layers_exist(case: Case) -> bool:
    if not _settings(case).random_ltd:
        return True
    given, depth = _settings(case).random_ltd_layer_id, case.config.model.num_layers
    return len(set(given)) == len(given) and max(given) < depth if given else depth > 2


def _counts_fit(case: Case) -> bool:
    given = _settings(case)
    count_fits = given.random_ltd_layer_num in (None, len(_layers(case)))
    return not given.random_ltd or (
        count_fits and given.random_ltd_total_layer_num in (None, case.config.model.num_layers)
    )


def _divides(case: Case) -> bool:
    parallel, length = case.config.parallel, case.config.model.seq_length
    pacing = _settings(case).kept_tokens(length)
    if pacing is None:
        return True
    multiple = sequence_multiple(parallel)
    return all(kept % multiple == 0 for _, kept in pieces(pacing) if kept < length)


SKIPPING_RULES: tuple[Rule, ...] = (
    Rule(
        "random_ltd_grows",
        (_MIN, _MAX, _MODEL.seq_length),
        "`random_ltd_min_value` must be at most `random_ltd_max_value`, which is `seq_length` if unset, and "
        "that at most `seq_length`",
        "let layers see more tokens, up to all of them",
        lambda c: (
            not _settings(c).random_ltd
            or (_settings(c).random_ltd_min_value or 1)
            <= (_settings(c).random_ltd_max_value or c.config.model.seq_length)
            <= c.config.model.seq_length
        ),
    ),
    Rule(
        "random_ltd_changes_countable",
        (_ROUNDED, _MIN, _MAX, _MODEL.seq_length),
        f"`random_ltd` must keep at most {MOST_CHANGES} different numbers of tokens",
        "raise `--random-ltd-seq-per-step`",
        lambda c: not _settings(c).too_many_changes(c.config.model.seq_length),
    ),
    Rule(
        "random_ltd_layers_exist",
        (_SKIPPING.random_ltd_layer_id, _MODEL.num_layers),
        "`random_ltd_layer_id` must name layers from 0 to `num_layers` - 1, each once, and at least one; by "
        "default, these are all but the first and the last",
        "name some of the model's layers",
        _layers_exist,
    ),
    Rule(
        "random_ltd_counts_fit",
        (_SKIPPING.random_ltd_layer_num, _TOTAL, _SKIPPING.random_ltd_layer_id, _MODEL.num_layers),
        "`random_ltd_layer_num` must be the number of layers that drop tokens, and "
        "`random_ltd_total_layer_num` that of all",
        "correct or leave out the numbers",
        _counts_fit,
    ),
    Rule(
        "random_ltd_divides_over_ranks",
        (_ROUNDED, _MIN, _MAX, _PARALLEL.tensor_model_parallel_size, _PARALLEL.context_parallel_size),
        "all numbers of tokens that `random_ltd` keeps must divide evenly over the ranks that share a "
        "sequence",
        "set `--random-ltd-seq-per-step`, and the first and last number, to multiples of that number",
        _divides,
        lambda c: f"each must be a multiple of {sequence_multiple(c.config.parallel)}",
    ),
)
