"""The schedules of a resumed run: the checkpoint's, unless a flag asks for the run's own.

Schedules are compared by their values, not by their settings: a longer training may have a different decay.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path

from megazero.checkpoint.manifest import STATE
from megazero.config.difficulties import Difficulties
from megazero.config.fields import FIELD_BY_PATH, names_with
from megazero.config.steps import Step
from megazero.config.training_plan import LrLengths, TrainingPlan, training_plan_of
from megazero.config.tree.config import Config
from megazero.config.tree.curriculum import CurriculumConfig
from megazero.config.tree.data_sampling import DataSamplingConfig
from megazero.config.tree.distillation import DistillationConfig
from megazero.config.tree.roles import Role
from megazero.config.tree.skipping import SkippingConfig
from megazero.config.tree.training import BatchConfig
from megazero.errors import CheckpointError, ConfigError
from megazero.optim.schedule import UpdateSchedule
from megazero.train.resume.facts import RunFacts
from megazero.train.resume.saved import SavedModel

# (number of the step at which it begins, value) for each value of a schedule, in order.
_Pieces = Sequence[tuple[int, object]]
_NOTHING: _Pieces = ((0, "none"),)
# A resume may change these as long as they are constant; then they are settings, not schedules.
_CONSTANTS = ("batch size", "sequence length")
_OVERRIDE, _KEEP = "--override-opt_param-scheduler", "--use-checkpoint-opt_param-scheduler"


def with_batch(batch: BatchConfig, size: int) -> BatchConfig:
    """Return the section with this global batch size, if it has none."""
    given = batch.final_batch_size is not None
    return batch if given else batch.model_copy(update={"global_batch_size": size})


def on_schedule(
    config: Config, plan: TrainingPlan, run: RunFacts, folder: Path
) -> tuple[Config, TrainingPlan, list[str]]:
    """Return the configuration and the plan with the schedules to continue with, and remarks about them.

    Args:
        plan: its plan, from the checkpoint's progress on.

    Raises:
        CheckpointError: the run's schedules differ from the checkpoint's, and no flag says which to take.
    """
    overrides = config.checkpoint.override_opt_param_scheduler
    now = UpdateSchedule.of(config.optimizer, plan).values()
    try:
        saved, before = _saved(config.curriculum, run, plan, folder)
        then = UpdateSchedule.of(saved.optimizer, before).values()
    except (CheckpointError, ConfigError) as error:
        if overrides:
            return config, plan, [f"new schedule ({_OVERRIDE}); the checkpoint's is unknown: {error}"]
        raise CheckpointError(
            f"`{folder}` must say on which schedule it was trained, but does not: {error}; set {_OVERRIDE} "
            "to use this run's"
        ) from error
    differing = _differing(then, now)
    rates = [f"{name} {was} -> {is_now}" for name, (was, is_now) in differing.items()]
    steps = [
        _stepwise(of, c.data_sampling, c.skipping, c.distillation)
        for c, of in ((saved, before), (config, plan))
    ]
    others = list(_other_changes(*steps))
    if not rates and not others:
        return config, plan, []
    if overrides:
        return config, plan, [f"new schedule ({_OVERRIDE}): {'; '.join(rates + others)}"]
    keeps = config.checkpoint.use_checkpoint_opt_param_scheduler
    if others or not keeps:
        raise CheckpointError(
            f"`{folder}` must go on with its schedule, but this run has another one "
            f"({'; '.join(others if keeps else rates + others)}); {_ways_out(differing, before.lr, others)}"
        )
    own = {name: getattr(saved.optimizer, name) for name in names_with(Role.SCHEDULE, "optimizer")}
    config = config.model_copy(update={"optimizer": config.optimizer.model_copy(update=own)})
    remark = "; ".join(f"{name} {was}, not {is_now}" for name, (was, is_now) in differing.items())
    return config, replace(plan, lr=before.lr), [f"the checkpoint's schedule goes on ({_KEEP}): {remark}"]


def _saved(
    now: CurriculumConfig, run: RunFacts, plan: TrainingPlan, folder: Path
) -> tuple[Config, TrainingPlan]:
    """The configuration of the checkpoint's run, and its plan from the checkpoint's progress on.

    Raises:
        CheckpointError: this version does not know a value in it.
        ConfigError: it has no length.
    """
    known = {
        name: getattr(field.annotation, "model_fields", {}) for name, field in Config.model_fields.items()
    }
    sections = {
        name: {field: value for field, value in section.items() if field in fields}
        for name, fields in known.items()
        if (section := run.config.get(name)) is not None
    }
    config = SavedModel(1, sections, folder / STATE).config()
    config = config.model_copy(update={"batch": with_batch(config.batch, run.global_batch_size)})
    custom = config.curriculum.seqlen_custom_schedule
    if custom is not None:  # never run code that only the checkpoint names
        if custom != now.seqlen_custom_schedule:
            raise CheckpointError(f"its sequence lengths are those of {custom}, which this run does not name")
        config = config.model_copy(update={"curriculum": now})
    before = training_plan_of(config, 1, plan.steps.start, plan.steps.origin)
    return config, before if run.lengths is None else replace(before, lr=run.lengths)


def _differing(then: Mapping[str, object], now: Mapping[str, object]) -> dict[str, tuple[object, object]]:
    both = {name: (then.get(name, "none"), now.get(name, "none")) for name in (*then, *now)}
    return {name: pair for name, pair in both.items() if pair[0] != pair[1]}


def _stepwise(
    plan: TrainingPlan,
    sampling: DataSamplingConfig,
    skipping: SkippingConfig,
    distillation: DistillationConfig,
) -> dict[str, _Pieces]:
    """The schedules of a run other than learning rate and weight decay, from the plan's start on."""
    steps = plan.steps
    values: dict[str, Callable[[Step], object]] = {
        "batch size": lambda step: step.batch_size,
        "sequence length": lambda step: (
            step.sequence_length if step.rows == 1 else f"{step.rows} rows of {step.sequence_length}"
        ),
        "tokens that layers see": lambda step: step.kept_tokens,
    }
    pieces: dict[str, _Pieces] = {
        name: _merged((step.before.iteration, value(step)) for step in steps.segments)
        for name, value in values.items()
    }
    if difficulties := Difficulties.of(sampling):
        firsts = [difficulties.before(start, steps).iteration for start in difficulties.starts]
        for number, metric in enumerate(difficulties.metrics):
            levels = [level[number] for level in difficulties.levels]
            pieces[f"difficulty by {metric}"] = _merged(dict(zip(firsts, levels, strict=True)).items())
    if skipping.progressive_layer_drop:
        pieces["layer drop"] = [(0, f"theta {skipping.pld_theta} and gamma {skipping.pld_gamma}")]
    end = distillation.kd_train_iters
    if distillation.kd and end is not None and end > steps.start.iteration:
        pieces["end of distillation"] = [(0, end)]
    return pieces


def _merged(pieces: Iterable[tuple[int, object]]) -> _Pieces:
    """Merge adjacent pieces with the same value."""
    return [next(same) for _, same in groupby(pieces, key=lambda piece: piece[1])]


def _other_changes(then: Mapping[str, _Pieces], now: Mapping[str, _Pieces]) -> Iterator[str]:
    for name in dict.fromkeys((*then, *now)):
        before, after = then.get(name, _NOTHING), now.get(name, _NOTHING)
        if before == after or (name in _CONSTANTS and len(before) == len(after) == 1):
            continue
        starts = sorted({start for start, _ in (*before, *after)})
        pairs = ((_value(before, start), _value(after, start), start) for start in starts)
        was, is_now, start = next(pair for pair in pairs if pair[0] != pair[1])
        yield f"{name} {was} -> {is_now}" + (f" after {start} steps" if start else "")


def _value(pieces: _Pieces, place: int) -> object:
    return next((value for start, value in reversed(pieces) if start <= place), pieces[0][1])


def _ways_out(rates: Collection[str], lengths: LrLengths, others: Collection[str]) -> str:
    if others:
        return f"give the settings that it had, or set {_OVERRIDE} to take the new ones"
    flag = FIELD_BY_PATH[f"optimizer.lr_decay_{lengths.unit}"].flag
    same_decay = f"{flag} {lengths.decay} or "
    keep = (same_decay if [*rates] == ["decay length of the learning rate"] else "") + _KEEP
    return f"set {keep} to keep the checkpoint's, or {_OVERRIDE} to take the new one"
