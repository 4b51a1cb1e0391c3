"""The settings of a DeepSpeed JSON for `megazero.initialize`, checked and completed by defaults."""

from __future__ import annotations

import os
from dataclasses import dataclass

from torch import nn

from megazero.config.deepspeed.batch import BatchTriangle, resolve_batch
from megazero.config.deepspeed.extras import Extras
from megazero.config.deepspeed.load import load_ds_config
from megazero.config.deepspeed.read import DeepSpeedSettings, read_deepspeed
from megazero.config.pacing import Pacing
from megazero.config.resolve import build_section
from megazero.config.rules.table import check_sections
from megazero.config.tree.config import Config
from megazero.config.tree.curriculum import CurriculumConfig
from megazero.config.tree.logging import LoggingConfig
from megazero.config.tree.offload import OffloadConfig
from megazero.config.tree.option import Section
from megazero.config.tree.precision import PrecisionConfig
from megazero.config.tree.profiling import ProfilingConfig
from megazero.config.tree.zero import ZeroConfig
from megazero.deepspeed.config import Json
from megazero.deepspeed.config.elasticity import elasticity_enabled, with_elastic_batches
from megazero.deepspeed.schedules.curriculum import LayerDropSchedule, ScriptLengths, layer_drop_of
from megazero.deepspeed.surface import VERSION
from megazero.errors import ConfigError

JsonSource = str | os.PathLike[str] | Json
"""The path of a JSON, or its content."""

DEFAULT_CLIP_GRAD = 1.0
"""The default of `gradient_clipping` in DeepSpeed since 0.19.3."""
_OWN_SCRIPTS_ONLY = ("data_efficiency.data_sampling.curriculum_learning",)
_USED = (
    *("zero", "offload", "precision", "logging", "profiling", "optimizer", "batch", "curriculum", "skipping"),
)
"""The sections of the tree that an engine reads."""


@dataclass(frozen=True)
class UserSettings:
    """All settings of an engine around a user's module.

    Attributes:
        zero: the ZeRO stage and its communication.
        offload: the states that are kept in host memory or on disk.
        precision: the dtype of weights, and the loss scale.
        logging: the monitors.
        profiling: the FLOPs profiler.
        extras: the optimizer, the schedule, and all other settings without a field in the tree.
        batch: the three batch sizes.
        clip_grad: the largest gradient norm; 0 is off.
        notes: warnings to print.
        seqlen: the sequence length at each step, counted from 1, which the engine passes to the module; None
            without a curriculum.
        layer_drop: the share of layers to keep, which the engine passes to the module; None for all.
    """

    zero: ZeroConfig
    offload: OffloadConfig
    precision: PrecisionConfig
    logging: LoggingConfig
    profiling: ProfilingConfig
    extras: Extras
    batch: BatchTriangle
    clip_grad: float
    notes: tuple[str, ...]
    seqlen: Pacing | ScriptLengths | None = None
    layer_drop: LayerDropSchedule | None = None


def choose_source(args: object, config: JsonSource | None, config_params: JsonSource | None) -> JsonSource:
    """Return the one configuration among these arguments of `initialize`.

    Raises:
        ConfigError: there is no configuration, or more than one.
    """
    candidates = {
        "config": config,
        "config_params": config_params,
        "args.deepspeed_config": getattr(args, "deepspeed_config", None),
        "args.deepscale_config": getattr(args, "deepscale_config", None),
    }
    sources = {name: source for name, source in candidates.items() if source is not None}
    if len(sources) != 1:
        names = f" ({', '.join(sources)})" if sources else ""
        raise ConfigError(
            f"`config` must be given once, but is given {len(sources)} times{names}; pass a path or a "
            "dictionary as `config`"
        )
    return next(iter(sources.values()))


def read_settings(source: JsonSource, data_parallel: int, model: nn.Module | None = None) -> UserSettings:
    """Read the settings of a JSON.

    Args:
        source: the path of the JSON, or its content.
        data_parallel: the number of ranks that samples are split over.
        model: the module; its `config.hidden_size`, if present, resolves keys that are "auto". None if it is
            not known yet.

    Raises:
        ConfigError: lists all faults of the JSON.
    """
    if elasticity_enabled(content := load_ds_config(source)):
        source = with_elastic_batches(content, data_parallel, VERSION)
    hidden = getattr(getattr(model, "config", None), "hidden_size", None)
    given = {"model.hidden_size": hidden} if isinstance(hidden, int) else {}
    read = read_deepspeed(source, data_parallel=data_parallel, given=given)
    problems = list(read.problems)
    notes = _narrow_reduction(read)
    sections: dict[str, Section] = {}
    for name in ("zero", "offload", "precision", "logging", "profiling"):
        try:
            sections[name] = build_section(name, [*read.defaults, *read.settings])
        except ConfigError as error:
            problems += error.violations
    problems += check_sections(sections)
    problems += _missing_sparse_attention(read.values.get("model.sparse_attention"), model)
    for name in _OWN_SCRIPTS_ONLY:
        if any(name in setting.source and setting.value is not False for setting in read.settings):
            problems.append(
                f"`{name}` must be off for a script with its own batches, but is on; use pretrain_gpt.py or "
                "pretrain_bert.py"
            )
    try:
        curriculum = build_section("curriculum", [*read.defaults, *read.settings])
        assert isinstance(curriculum, CurriculumConfig)
        seqlen = _seqlen(curriculum)
    except ConfigError as error:
        problems += error.violations
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    batch = read.batch
    if batch is None:  # no batch size is given: `resolve_batch` raises the error
        batch = resolve_batch(None, None, None, data_parallel)
    if notes:
        sections["zero"] = sections["zero"].model_copy(update={"grad_reduce_dtype": "fp16"})
    tree = Config.model_construct(set(sections), **sections)
    return UserSettings(
        tree.zero,
        tree.offload,
        tree.precision,
        tree.logging,
        tree.profiling,
        extras=read.extras,
        batch=batch,
        clip_grad=read.values.get("optimizer.clip_grad", DEFAULT_CLIP_GRAD),
        notes=(*notes, *_without_effect(read), *read.strangers),
        seqlen=seqlen,
        layer_drop=layer_drop_of(read.values),
    )


def _narrow_reduction(read: DeepSpeedSettings) -> tuple[str, ...]:
    """Remove an fp16 reduction without a loss scale from the settings; return a warning about it.

    A rule of the configuration refuses this combination. DeepSpeed allows it, so the caller sets the dtype
    after the rules have been checked.
    """
    path = "zero.grad_reduce_dtype"
    if read.values.get(path) != "fp16" or read.values.get("precision.dtype") == "fp16":
        return ()
    read.settings[:] = [setting for setting in read.settings if setting.spec.path != path]
    return (
        f"`communication_data_type` of {read.name} is fp16 without a loss scale: a mean of gradients "
        "above 65504 is inf, and its step is skipped.",
    )


def _missing_sparse_attention(mode: str | None, model: nn.Module | None) -> list[str]:
    """Return a complaint if a JSON asks for sparse attention and the model, if known, has none."""
    if mode in (None, "dense") or model is None:
        return []
    if any(hasattr(module, "sparsity_config") for module in model.modules()):
        return []
    return [
        "the model must have a `SparseSelfAttention` with `sparse_attention`, but has none; replace its "
        "attention by `deepspeed.ops.sparse_attention.SparseAttentionUtils`, or leave the section out"
    ]


def _seqlen(section: CurriculumConfig) -> Pacing | ScriptLengths | None:
    """Return the sequence lengths of a curriculum; None without one."""
    if section.seqlen_schedule == "none":
        return None
    if section.seqlen_schedule == "custom":
        return ScriptLengths()
    last = section.seqlen_max_difficulty or max(section.seqlen_difficulty, default=None)
    lengths = None if last is None else section.seqlen(last)
    if lengths is None:
        raise ConfigError(
            "`curriculum_learning` must describe how lengths grow, but does not; give `min_difficulty`, "
            "`max_difficulty` and `total_curriculum_step`, with `root_degree` for fixed_root, or for "
            "fixed_discrete growing levels in `difficulty` and the last steps of all but one in `max_step`"
        )
    return lengths


def _without_effect(read: DeepSpeedSettings) -> tuple[str, ...]:
    """Return a warning that lists the keys without effect, by reason."""
    reasons = {ignored.key: ignored.reason for ignored in read.ignored}
    for setting in read.settings:
        if setting.spec.section not in _USED:
            key = setting.source.rpartition(": ")[2].strip("`")
            reasons[key] = "the model and the script decide it"
    by_reason: dict[str, list[str]] = {}
    for key, reason in reasons.items():
        by_reason.setdefault(reason, []).append(key)
    listed = "; ".join(f"{', '.join(keys)} ({reason})" for reason, keys in by_reason.items())
    return (f"keys of {read.name} without effect here: {listed}.",) if listed else ()
