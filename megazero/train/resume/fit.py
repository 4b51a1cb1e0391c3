"""Checks that a checkpoint fits the run that resumes from it: its model, its tensors and its data."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from pathlib import Path

from megazero.checkpoint.part import Part, Source, misfits
from megazero.checkpoint.upcycling import dense_model
from megazero.config.derive import FREE_MODEL_FIELDS, Difference, model_differences
from megazero.config.fields import FIELD_BY_PATH, SECTIONS, names_with
from megazero.config.rules.table import check
from megazero.config.training_plan import TrainingPlan, training_plan_of
from megazero.config.tree.config import Config
from megazero.config.tree.model import ModelConfig
from megazero.config.tree.parallel import ParallelConfig
from megazero.config.tree.roles import Role
from megazero.config.tree.sparse import SPARSE_FIELDS
from megazero.config.tree.tokenizer import TokenizerConfig
from megazero.data.blended import SampleDataset
from megazero.data.sources import contents
from megazero.errors import CheckpointError, ConfigError, DataError
from megazero.mpu.context import ParallelContext
from megazero.mpu.grid import AXES
from megazero.mpu.messages import broadcast_value
from megazero.train.resume.facts import DataFacts, RunFacts, SavedConfig
from megazero.train.resume.saved import Checkpoint, SavedModel
from megazero.train.resume.scheduled import on_schedule, with_batch

ROTARY_FIELDS = frozenset(names_with(Role.ROTARY))
"""Settings of rotary positions, which --extend-context lets a resume change."""
OF_THE_HEAD = frozenset(names_with(Role.HEAD))
"""Settings of a pretraining head, which a classifier does not have."""

_SHOWN = 10


def fit(
    config: Config,
    checkpoint: Checkpoint,
    run: RunFacts | None,
    vocab_size: int,
    context: ParallelContext,
    begins_experts: bool,
) -> tuple[Config, TrainingPlan, list[str]]:
    """Return the configuration and the plan to continue with, and remarks on what has changed.

    Args:
        run: the checkpoint's facts about its run; None if training begins anew with its weights.
        begins_experts: whether experts are copies of the checkpoint's dense MLPs.

    Raises:
        CheckpointError: the checkpoint has another model, or its run another schedule.
        ConfigError: the checkpoint's global batch, which is kept, cannot be distributed over these ranks.
    """
    model = dense_model(config.model) if begins_experts else config.model
    saved, folder, extends = checkpoint.model, checkpoint.folder, config.checkpoint.extend_context
    free = free_fields(model, saved, folder, extends=extends) | free_to_begin(saved, run is None)
    check_model(model, vocab_size, saved, folder, free)
    _check_ends(config.tokenizer, model, saved, folder)
    if run is None:
        return config, training_plan_of(config, context.data.size), []
    kept = config.model_copy(update={"batch": with_batch(config.batch, run.global_batch_size)})
    if kept.batch is not config.batch and (problems := check(kept, context.world_size)):
        raise ConfigError(
            [f"the global batch of {folder} is kept, but does not fit here: {p}" for p in problems]
        )
    plan = training_plan_of(kept, context.data.size, run.state.train_state().progress, run.origin)
    kept, plan, remarks = on_schedule(kept, plan, run, folder)
    changes = [
        f"{where}: {before} -> {now}"
        for where, before, now in _differences(run.config, kept.model_dump(mode="json"))
    ]
    return kept, plan, remarks + (["changed since the checkpoint: " + "; ".join(changes)] if changes else [])


def free_to_begin(saved: SavedModel, anew: bool) -> Set[str]:
    """Settings that a new training may change: those of sparse attention, if the saved model is dense."""
    dense = saved.sections["model"].get("sparse_attention", "dense") == "dense"
    return SPARSE_FIELDS if anew and dense else frozenset()


def check_tensors(source: Source, parts: Iterable[Part], where: object, unused: Iterable[str] = ()) -> None:
    """Refuse a source with missing, misshapen or unused tensors, naming them."""
    wrong = misfits(source.shapes, {part.key: part.shape for part in parts})
    wrong += [f"{name} is not used" for name in unused]
    if wrong:
        more = f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise CheckpointError(f"`{where}` does not fit this model: " + "; ".join(wrong[:_SHOWN]) + more)


def check_model(
    model: ModelConfig, vocab_size: int, saved: SavedModel, folder: Path, free: Set[str] = FREE_MODEL_FIELDS
) -> None:
    """Refuse a checkpoint of another model, naming the differences; settings in `free` may differ.

    Raises:
        CheckpointError: the models differ.
    """
    wrong = [f"{name} {before} (now {after})" for name, before, after in unlike(saved, model, free)]
    if saved.vocab_size != vocab_size:
        wrong.append(f"vocab_size {saved.vocab_size} (now {vocab_size})")
    if wrong:
        raise CheckpointError(f"`{folder}` must hold this model, but has {', '.join(wrong)}")


def unlike(saved: SavedModel, model: ModelConfig, free: Set[str]) -> list[Difference]:
    """The settings in which a checkpoint's model differs: (field, its value, the value now)."""
    # Only fields that both versions of the code have; differences in other fields show in tensors' names.
    compared = [name for name in ModelConfig.model_fields if name in saved.sections["model"].keys() - free]
    return model_differences(saved.settings, model, compared)


def free_fields(model: ModelConfig, saved: SavedModel, folder: Path, *, extends: bool) -> frozenset[str]:
    """The settings that may differ between the checkpoint's model and `model`; more if it `extends` context.

    Raises:
        CheckpointError: `model` scales positions from a length that is not the checkpoint's.
    """
    if not extends:
        return FREE_MODEL_FIELDS
    before = saved.settings
    if not before.rotates:
        return FREE_MODEL_FIELDS  # without rotary positions, a change of their kind is refused
    lengths = (before.seq_length, before.positions) if before.scaled_from is None else (before.scaled_from,)
    if model.scaled_from is not None and model.scaled_from not in lengths:
        name = "yarn" if model.scales_by_yarn else "rope"
        raise CheckpointError(
            f"`{name}_original_max_position_embeddings` must be the sequence length of the first training of "
            f"`{folder}` ({lengths[0]}), but is {model.scaled_from}; set it to that"
        )
    return FREE_MODEL_FIELDS | ROTARY_FIELDS


def _check_ends(now: TokenizerConfig, model: ModelConfig, saved: SavedModel, folder: Path) -> None:
    """Refuse to swap the ids with which T5's decoder begins and ends."""
    then, first = saved.sections.get("tokenizer", {}).get("wordpiece_first"), now.wordpiece_first
    decodes = model.t5_decoder_layers is not None
    if decodes and now.tokenizer_type is not None and (then or first) != first:
        raise CheckpointError(
            f"`wordpiece_first` must be {then}, with which `{folder}` was trained, but is {first}; set "
            f"--wordpiece-first {then}"
        )


def _differences(saved: SavedConfig, now: SavedConfig) -> list[Difference]:
    """(setting, saved value, value now) for every setting that differs and affects the training."""
    differences = []
    for section in sorted({*saved, *now}):
        before, after = saved.get(section) or {}, now.get(section) or {}
        differences += [
            (f"{section}.{name}", before.get(name), after.get(name))
            for name in sorted({*before, *after})
            if before.get(name) != after.get(name) and Role.QUIET not in _roles(section, name)
        ]
    return differences


def _roles(section: str, name: str) -> Role:
    """The roles of a setting, or of its section if this version does not know the setting."""
    spec, known = FIELD_BY_PATH.get(f"{section}.{name}"), SECTIONS.get(section)
    return spec.roles if spec is not None else Role.NONE if known is None else known.roles


def data_record(dataset: SampleDataset | None, context: ParallelContext) -> list[DataFacts] | None:
    """The first rank's record of the training data; None without data. Every rank calls this.

    Other ranks' copies may have other paths, but all ranks must come to the same verdict.
    """
    if dataset is None:
        return None
    own = contents(dataset) if context.rank == 0 else None
    return [DataFacts(**facts) for facts in broadcast_value(context.world, own, context.device)]


def compare_data(
    before: Sequence[DataFacts] | None, now: Sequence[DataFacts] | None, changes_pass: bool
) -> tuple[str, ...]:
    """Return remarks on the differences between the run's data and the checkpoint's.

    Args:
        before: the checkpoint's record.
        now: the run's record; if either is None, nothing is compared.
        changes_pass: whether changed files are reported instead of refused.

    Raises:
        DataError: files have changed (names all of them), or the checkpoint's version blended a dataset with
            itself.
    """
    if before is None or now is None:
        return ()
    known = {data.prefix: data for data in before}
    same = {data.prefix for data in now} & {*known}
    changed = [file for data in now if data.prefix in same for file in _differing(known[data.prefix], data)]
    if changed and not changes_pass:
        raise DataError(
            f"`{'`, `'.join(changed)}` must hold what the checkpoint was trained on, but was changed since; "
            "put it back, give other data under another path, or go on with --no-verify-data"
        )
    moved = [data for data in now if data.prefix in same and data.order != known[data.prefix].order]
    if moved:
        more, was = ("more", "shuffled") if moved[0].order else ("less", "computed")
        raise DataError(
            f"`--index-memory-gib` must leave {moved[0].prefix} in the order of the checkpoint, which was "
            f"{was}, but it is another now; give {more}"
        )
    twice = [
        data.prefix for data in now if data.named != 1 and any(record.named is None for record in before)
    ]
    if twice:
        raise DataError(
            f"`{'`, `'.join(twice)}` must be named once in a blend, but is named several times, and the "
            "version that saved the checkpoint mixed it with itself; name it once with the sum of its "
            "weights, and the run goes on with its samples in another order"
        )
    remarks = [f"{file} is not what the checkpoint was trained on" for file in changed]
    left = [data for data in before if data.prefix not in same]
    for data in now:
        if data.prefix in same:
            continue
        copies = [other for other in left if not _differing(other, data)]
        if copies:
            remarks.append(f"{data.prefix} holds the data that were {copies[0].prefix} before")
            left.remove(copies[0])
        else:
            remarks.append(f"{data.prefix} is trained on from here, and was not before the checkpoint")
    remarks += [f"{data.prefix} was trained on before the checkpoint, and is no longer" for data in left]
    return tuple(remarks)


def _differing(before: DataFacts, now: DataFacts) -> list[str]:
    """The files of `now` whose hashes differ from those in `before`."""
    sums_differ = None not in (before.blocks, now.blocks) and before.blocks != now.blocks
    differ = {"idx": before.idx != now.idx, "bin": before.bin != now.bin or sums_differ}
    differ["mask"] = before.mask != now.mask
    return [f"{now.prefix}.{suffix}" for suffix, differs in differ.items() if differs]


def changed_sums(run: RunFacts, config: ParallelConfig, now: Mapping[str, str], world_size: int) -> list[str]:
    """Return a remark for each transport of sums that has changed since the checkpoint.

    A change of layout changes sums anyway, and has no remarks.

    Args:
        run: the checkpoint's facts.
        config: the present parallelism.
        now: the present `transports`.
        world_size: the present number of ranks.
    """
    before, saved = run.written_by.transports, run.config.get("parallel") or {}
    settings = [axis.setting for axis in AXES.values() if axis.setting is not None]
    alike = all(saved.get(name) == getattr(config, name) for name in settings)
    if run.written_by.world_size != world_size or not alike:
        return []
    changed: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, way in now.items():
        if before.get(name, way) != way:
            changed[before[name], way].append(name)
    return [
        f"sums over {', '.join(names)} go over {way} now, and went over {then} before the checkpoint, in "
        "another order: the last bits may differ from those of a run that was not interrupted"
        for (then, way), names in changed.items()
    ]
