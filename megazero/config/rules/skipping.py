"""Rules about random-LTD and progressive layer dropping."""

from __future__ import annotations

from megazero.config.pacing import MOST_CHANGES, pieces
from megazero.config.rules.rule import Case, Rule
from megazero.config.skipping import SkippingConfig

_LTD = "skipping.random_ltd"
_LAYERS = "skipping.random_ltd_layer_id"
_MIN = "skipping.random_ltd_min_value"
_MAX = "skipping.random_ltd_max_value"
_STEPS = "skipping.random_ltd_require_steps"
_ROUNDED = "skipping.random_ltd_seq_per_step"
_COUNT = "skipping.random_ltd_layer_num"
_TOTAL = "skipping.random_ltd_total_layer_num"
_PLD = "skipping.progressive_layer_drop"
_THETA, _GAMMA = "skipping.pld_theta", "skipping.pld_gamma"
_DEPTH, _LENGTH = "model.num_layers", "model.seq_length"


def _settings(case: Case) -> SkippingConfig:
    return case.config.skipping


def _default(case: Case, *names: str) -> bool:
    fields = SkippingConfig.model_fields
    return all(getattr(_settings(case), name) == fields[name].default for name in names)


def _given_for_a_reason(case: Case) -> bool:
    names = [name for name in SkippingConfig.model_fields if name.startswith("random_ltd_")]
    return _settings(case).random_ltd or _default(case, *names)


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
    if pacing is None or not parallel.sequence_parallel:
        return True
    ranks = parallel.tensor_model_parallel_size
    return all(kept % ranks == 0 for _, kept in pieces(pacing) if kept < length)


SKIPPING_RULES: tuple[Rule, ...] = (
    Rule(
        "random_ltd_has_its_numbers",
        (_MIN, _STEPS),
        "`random_ltd_min_value` and `random_ltd_require_steps` must be set with `random_ltd`",
        "say with how many tokens layers begin, and after how many steps they see all",
        lambda c: (
            not _settings(c).random_ltd
            or None not in (_settings(c).random_ltd_min_value, _settings(c).random_ltd_require_steps)
        ),
        reads=(_LTD,),
    ),
    Rule(
        "random_ltd_settings_need_it",
        (_LAYERS, _MIN, _MAX, _STEPS, _ROUNDED, _COUNT, _TOTAL, _LTD),
        "settings of `random_ltd` must be left out without it",
        "add `--random-ltd`, or leave them out",
        _given_for_a_reason,
    ),
    Rule(
        "random_ltd_grows",
        (_MIN, _MAX, _LENGTH),
        "`random_ltd_min_value` must be at most `random_ltd_max_value`, which is `seq_length` if unset, and "
        "that at most `seq_length`",
        "let layers see more tokens, up to all of them",
        lambda c: (
            not _settings(c).random_ltd
            or (_settings(c).random_ltd_min_value or 1)
            <= (_settings(c).random_ltd_max_value or c.config.model.seq_length)
            <= c.config.model.seq_length
        ),
        reads=(_LTD,),
    ),
    Rule(
        "random_ltd_changes_countable",
        (_ROUNDED, _MIN, _MAX, _LENGTH),
        f"`random_ltd` must keep at most {MOST_CHANGES} different numbers of tokens",
        "raise `--random-ltd-seq-per-step`",
        lambda c: not _settings(c).too_many_changes(c.config.model.seq_length),
        reads=(_LTD,),
    ),
    Rule(
        "random_ltd_layers_exist",
        (_LAYERS, _DEPTH),
        "`random_ltd_layer_id` must name layers from 0 to `num_layers` - 1, each once, and at least one; by "
        "default, these are all but the first and the last",
        "name some of the model's layers",
        _layers_exist,
        reads=(_LTD,),
    ),
    Rule(
        "random_ltd_counts_fit",
        (_COUNT, _TOTAL, _LAYERS, _DEPTH),
        "`random_ltd_layer_num` must be the number of layers that drop tokens, and "
        "`random_ltd_total_layer_num` that of all",
        "correct or leave out the numbers",
        _counts_fit,
        reads=(_LTD,),
    ),
    Rule(
        "random_ltd_divides_over_ranks",
        (_ROUNDED, _MIN, _MAX, "parallel.tensor_model_parallel_size"),
        "all numbers of tokens that `random_ltd` keeps must be multiples of `tensor_model_parallel_size` "
        "with `sequence_parallel`",
        "choose a `--random-ltd-seq-per-step` that is",
        _divides,
        reads=(_LTD, _STEPS, _LENGTH, "parallel.sequence_parallel"),
    ),
    Rule(
        "random_ltd_leaves_packed_rows",
        (_LTD, "data.bert_pack"),
        "`random_ltd` must be off with `bert_pack`, as what is kept of a sample would depend on which others "
        "share its row",
        "leave one of them out",
        lambda c: not (_settings(c).random_ltd and c.config.data.bert_pack),
    ),
    Rule(
        "skipping_is_for_pretraining",
        (_LTD, _PLD, "finetune.task"),
        "`random_ltd` and `progressive_layer_drop` must be off where a model is fine-tuned for a task",
        "leave them out",
        lambda c: c.config.finetune.task is None or _default(c, "random_ltd", "progressive_layer_drop"),
    ),
    Rule(
        "layer_drop_settings_need_it",
        (_THETA, _GAMMA, _PLD),
        "`pld_theta` and `pld_gamma` must be left out without `progressive_layer_drop`",
        "add `--progressive-layer-drop`, or leave them out",
        lambda c: _settings(c).progressive_layer_drop or _default(c, "pld_theta", "pld_gamma"),
    ),
)
