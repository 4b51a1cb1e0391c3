"""Rules about curricula over the sequence length."""

from __future__ import annotations

from collections.abc import Callable

from megazero.config.derive import sequence_multiple
from megazero.config.fields import paths
from megazero.config.pacing import MOST_CHANGES, Pacing, pieces
from megazero.config.rules.rule import Case, Rule
from megazero.config.tree.curriculum import CurriculumConfig

_CURRICULUM, _MODEL, _PARALLEL = paths.curriculum, paths.model, paths.parallel

_MAX = _CURRICULUM.seqlen_max_difficulty
_STEP = _CURRICULUM.seqlen_difficulty_step
_LEVELS = _CURRICULUM.seqlen_difficulty


def _settings(case: Case) -> CurriculumConfig:
    return case.config.curriculum


def _is(case: Case, *schedules: str) -> bool:
    return _settings(case).seqlen_schedule in schedules


def _pacing(case: Case) -> Pacing | None:
    return _settings(case).seqlen(case.config.model.seq_length)


def _fault(case: Case) -> str | None:
    return _settings(case).fault_of_custom(case.config.model.seq_length)


def _grows(case: Case) -> bool:
    given, length = _settings(case), case.config.model.seq_length
    if not _is(case, "fixed_linear", "fixed_root") or given.seqlen_min_difficulty is None:
        return True
    return given.seqlen_min_difficulty <= (given.seqlen_max_difficulty or length)


def _if_paced(holds: Callable[[Case, Pacing], bool]) -> Callable[[Case], bool]:
    def judge(case: Case) -> bool:
        pacing = _pacing(case)
        return pacing is None or holds(case, pacing)

    return judge


def _divides(case: Case, pacing: Pacing) -> bool:
    multiple = sequence_multiple(case.config.parallel)
    return all(length % multiple == 0 for _, length in pieces(pacing))


CURRICULUM_RULES: tuple[Rule, ...] = (
    Rule(
        "seqlen_levels_fit",
        (_LEVELS, _CURRICULUM.seqlen_max_step, _CURRICULUM.seqlen_schedule),
        "`seqlen_difficulty` and `seqlen_max_step` must grow, one level more than ends, with a "
        "`seqlen_schedule` of fixed_discrete",
        "name a last step for each level but the last",
        lambda c: not _is(c, "fixed_discrete") or _pacing(c) is not None,
    ),
    Rule(
        "seqlen_ramp_grows",
        (_CURRICULUM.seqlen_min_difficulty, _MAX, _MODEL.seq_length),
        "`seqlen_min_difficulty` must be at most `seqlen_max_difficulty`, which is `seq_length` if unset",
        "let sequences grow",
        _grows,
    ),
    Rule(
        "seqlen_changes_countable",
        (_STEP, _CURRICULUM.seqlen_min_difficulty, _MAX, _MODEL.seq_length),
        f"a `seqlen_schedule` must have at most {MOST_CHANGES} different lengths",
        "raise `--seqlen-difficulty-step`",
        lambda c: not _settings(c).too_many_changes(c.config.model.seq_length),
    ),
    Rule(
        "seqlen_within_sequences",
        (_MAX, _LEVELS, _MODEL.seq_length),
        "lengths of a `seqlen_schedule` must be at most `seq_length`",
        "end there, or raise `--seq-length`",
        _if_paced(lambda c, pacing: pacing.hardest <= c.config.model.seq_length),
    ),
    Rule(
        "seqlen_divides_over_ranks",
        (_STEP, _LEVELS, _MAX, _PARALLEL.tensor_model_parallel_size, _PARALLEL.context_parallel_size),
        "all lengths of a `seqlen_schedule` must divide evenly over the ranks that share a sequence",
        "set `--seqlen-difficulty-step`, and the first and last length, to multiples of that number",
        _if_paced(_divides),
        lambda c: f"each must be a multiple of {sequence_multiple(c.config.parallel)}",
    ),
    Rule(
        "seqlen_custom_is_a_pacing",
        (_CURRICULUM.seqlen_custom_schedule,),
        "the function of `seqlen_custom_schedule` must be one from counts to lengths that never fall",
        "correct it",
        lambda c: _fault(c) is None,
        lambda c: _fault(c) or "",
    ),
)
