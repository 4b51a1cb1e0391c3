"""Rules about curricula over the sequence length."""

from __future__ import annotations

from megazero.config.derive import sequence_multiple
from megazero.config.fields import paths
from megazero.config.pacing import Pacing, pieces
from megazero.config.rules.rule import Case, rule

_CURRICULUM, _MODEL, _PARALLEL = paths.curriculum, paths.model, paths.parallel

_MAX = _CURRICULUM.seqlen_max_difficulty
_STEP = _CURRICULUM.seqlen_difficulty_step
_LEVELS = _CURRICULUM.seqlen_difficulty


def _pacing(case: Case) -> Pacing | None:
    return case.config.curriculum.seqlen(case.model.seq_length)


def _fault(case: Case) -> str | None:
    return case.config.curriculum.fault_of_custom(case.model.seq_length)


@rule(
    (_LEVELS, _CURRICULUM.seqlen_max_step, _CURRICULUM.seqlen_schedule),
    "name a last step for each level but the last",
)
def seqlen_levels_fit(case: Case) -> bool:
    """`seqlen_difficulty` and `seqlen_max_step` must grow, one level more than ends, with a `seqlen_schedule`
    of fixed_discrete"""
    return case.config.curriculum.seqlen_schedule != "fixed_discrete" or _pacing(case) is not None


@rule((_CURRICULUM.seqlen_min_difficulty, _MAX, _MODEL.seq_length), "let sequences grow")
def seqlen_ramp_grows(case: Case) -> bool:
    """`seqlen_min_difficulty` must be at most `seqlen_max_difficulty`, which is `seq_length` if unset"""
    settings = case.config.curriculum
    if settings.seqlen_schedule not in ("fixed_linear", "fixed_root"):
        return True
    return (settings.seqlen_min_difficulty or 0) <= (settings.seqlen_max_difficulty or case.model.seq_length)


@rule((_STEP, _CURRICULUM.seqlen_min_difficulty, _MAX, _MODEL.seq_length), "raise `--seqlen-difficulty-step`")
def seqlen_changes_countable(case: Case) -> bool:
    """a `seqlen_schedule` must have at most 100000 different lengths"""
    return not case.config.curriculum.too_many_changes(case.model.seq_length)


@rule((_MAX, _LEVELS, _MODEL.seq_length), "end there, or raise `--seq-length`")
def seqlen_within_sequences(case: Case) -> bool:
    """lengths of a `seqlen_schedule` must be at most `seq_length`"""
    pacing = _pacing(case)
    return pacing is None or pacing.hardest <= case.model.seq_length


@rule(
    (_STEP, _LEVELS, _MAX, _PARALLEL.tensor_model_parallel_size, _PARALLEL.context_parallel_size),
    "set `--seqlen-difficulty-step`, and the first and last length, to multiples of that number",
    detail=lambda c: f"each must be a multiple of {sequence_multiple(c.parallel)}",
)
def seqlen_divides_over_ranks(case: Case) -> bool:
    """all lengths of a `seqlen_schedule` must divide evenly over the ranks that share a sequence"""
    pacing, multiple = _pacing(case), sequence_multiple(case.parallel)
    return pacing is None or all(length % multiple == 0 for _, length in pieces(pacing))


@rule((_CURRICULUM.seqlen_custom_schedule,), "correct it", detail=lambda c: _fault(c) or "")
def seqlen_custom_is_a_pacing(case: Case) -> bool:
    """the function of `seqlen_custom_schedule` must map counts to lengths that never fall"""
    return _fault(case) is None
