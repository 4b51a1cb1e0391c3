"""Notes of a run on settings without the effect that their name promises, and on curricula cut short."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from megazero.config.condition import Need
from megazero.config.derive import PipelineShape
from megazero.config.fields import FIELD_BY_PATH, FIELDS, fields_with, paths
from megazero.config.pacing import pieces, reached
from megazero.config.rules.routing import expert_counts
from megazero.config.rules.rule import Case, display_name, value_at
from megazero.config.steps import Progress, Unit
from megazero.config.tree.config import Config
from megazero.config.tree.roles import Role

_MODEL, _PARALLEL = paths.model, paths.parallel


@dataclass(frozen=True)
class Note:
    """Settings without effect: both Megatrons accept them in silence, and here the run says so.

    Attributes:
        fields: paths of the settings.
        needs: the setting or value without which they have no effect, in words.
        met: whether a configuration has it.
        effect: the consequence of its absence, as a clause.
    """

    fields: tuple[Any, ...]
    needs: str
    met: Callable[[Config], bool]
    effect: str

    def sentence(self, config: Config) -> str | None:
        """The note of a run; None if none of the settings is given or they have their effect."""
        given = [path for path in self.fields if value_at(config, path) != FIELD_BY_PATH[path].default]
        if not given or self.met(config):
            return None
        names = " and ".join(f"`{display_name(path)}`" for path in given)
        has = "has" if len(given) == 1 else "have"
        return f"{names} {has} no effect without {self.needs}: {self.effect}."


def _idle_settings() -> Iterator[Note]:
    """Make one note for all settings with the same `idle_without`, in the tree's order.

    Where a model has no experts, another note names the settings about them.
    """
    takers: dict[tuple[Need, bool], list[str]] = {}
    for spec in FIELDS:
        if spec.idle_without is not None:
            takers.setdefault((spec.idle_without, Role.EXPERTS in spec.roles), []).append(spec.path)
    for (need, of_experts), fields in takers.items():
        yield Note(tuple(fields), _words(need), partial(_met, need, of_experts), need.why)


def _words(need: Need) -> str:
    """Put a need into words: a setting by its name, or a value with its flag."""
    words = [
        f"`{FIELD_BY_PATH[condition.path].flag} {value}`" if condition.values else f"`{value}`"
        for condition in need.conditions
        for value in condition.values or (display_name(condition.path),)
    ]
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def _met(need: Need, of_experts: bool, config: Config) -> bool:
    idle = of_experts and not config.model.num_experts
    return idle or any(c.holds(value_at(config, c.path)) for c in need.conditions)


def _floor_counts(config: Config) -> bool:
    """Whether `moe_min_capacity` is above the capacity by `moe_expert_capacity_factor` in every layer."""
    model, counts = config.model, expert_counts(config.model)
    if model.moe_expert_capacity_factor is None or not counts:
        return False
    together = config.batch.micro_batch_size if model.moe_capacity_scope == "micro_batch" else 1
    share = model.seq_length * together * model.moe_router_topk / min(counts)
    return share * model.moe_expert_capacity_factor <= model.moe_min_capacity - 1


def _window_hides(config: Config) -> bool:
    """Whether a window is shorter than the sequence, so that it hides something."""
    sides, last = config.model.window_size or (), config.model.seq_length - 1
    return any(0 <= side < last for side in sides[: 1 if config.model.family == "gpt" else 2])


NOTES: tuple[Note, ...] = (
    *_idle_settings(),
    Note(
        (_MODEL.rotary_base, _MODEL.rotary_percent),
        "rotary positions",
        lambda config: config.model.rotates,
        "nothing is rotated",
    ),
    Note(
        (_PARALLEL.microbatch_group_size_per_virtual_pipeline_stage,),
        "the interleaved schedule",
        lambda config: PipelineShape.of(config).kind == "interleaved",
        "micro-batches do not pass through chunks in groups",
    ),
    Note(
        (_MODEL.window_size,),
        "a longer `seq_length`",
        _window_hides,
        "the window is as long as the sequence, so it hides nothing in training",
    ),
    Note(
        (
            *(spec.path for spec in fields_with(Role.EXPERTS) if spec.name != "num_experts"),
            _PARALLEL.expert_tensor_parallel_size,
            _PARALLEL.moe_token_dispatcher_type,
        ),
        "`num_experts`",
        lambda config: bool(config.model.num_experts),
        "no layer has experts",
    ),
    Note(
        (_MODEL.moe_expert_capacity_factor,),
        "a smaller `moe_min_capacity`",
        lambda config: not _floor_counts(config),
        "it gives an expert less than that, and the larger one counts",
    ),
    Note(
        (_MODEL.moe_aux_loss_coeff,),
        "a `moe_router_load_balancing_type`",
        lambda config: (
            not config.model.num_experts or config.model.moe_router_load_balancing_type != ("none",)
        ),
        "no loss balances the experts",
    ),
)


def notes_on(config: Config) -> list[str]:
    """The notes of a run on its settings without effect."""
    return [line for note in NOTES if (line := note.sentence(config))]


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
