"""Notes on curricula that do not reach their end within the training; both Megatrons say nothing."""

from __future__ import annotations

from collections.abc import Iterator

from megazero.config.pacing import pieces, reached
from megazero.config.rules.rule import Case
from megazero.config.steps import Progress, Unit


def cut_short(case: Case) -> list[str]:
    """Return a sentence on each curriculum that the training cuts short."""
    return [] if case.end is None else [*_lengths(case), *_metrics(case), *_kept_tokens(case)]


def _counted(end: Progress, unit: Unit) -> str:
    return f"{end.count(unit)} {'iterations' if unit == 'iters' else unit}"


def _lengths(case: Case) -> Iterator[str]:
    settings, end = case.config.curriculum, case.end
    pacing = settings.seqlen(case.config.model.seq_length)
    if pacing is None or end is None:
        return
    last, unit = pieces(pacing)[-1][0], settings.seqlen_unit
    if last and last >= end.count(unit):
        yield (
            f"the training ends after {_counted(end, unit)}, before the sequence length of "
            f"`seqlen_schedule` stops growing at {last}."
        )


def _metrics(case: Case) -> Iterator[str]:
    settings, end = case.config.data_sampling, case.end
    for metric in settings.curriculum_metrics:
        if metric.pacing is None or end is None:
            continue
        last, unit = reached(metric.pacing), settings.curriculum_unit
        if last >= end.count(unit) > 0:
            yield (
                f"the training ends after {_counted(end, unit)}, before the curriculum of `{metric.name}` "
                f"gets to its end at {last}."
            )


def _kept_tokens(case: Case) -> Iterator[str]:
    settings, end = case.config.skipping, case.end
    total = settings.random_ltd_require_steps
    if settings.random_ltd and total is not None and end is not None and total > end.iteration:
        yield (
            f"the training ends after {end.iteration} iterations, before layers with `random_ltd` see all "
            f"tokens at {total}."
        )
