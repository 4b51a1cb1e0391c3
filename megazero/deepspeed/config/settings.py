"""The settings in a DeepSpeed JSON for `megazero.initialize`, checked and complete."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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
from megazero.deepspeed.config.elasticity import elasticity_enabled, with_elastic_batches
from megazero.deepspeed.config.sparse import sparse_faults
from megazero.deepspeed.schedules.curriculum import LayerDropSchedule, ScriptLengths, layer_drop_of
from megazero.deepspeed.surface import VERSION
from megazero.errors import ConfigError

JsonSource = str | os.PathLike[str] | Mapping[str, Any]

CLIPPED = 1.0
"""The gradient norm to which DeepSpeed clips where `gradient_clipping` is absent, since 0.19.3."""
_FOR_SCRIPTS_OF_OURS = ("data_efficiency.data_sampling.curriculum_learning",)
_USED = (
    "zero",
    "offload",
    "precision",
    "logging",
    "profiling",
    "optimizer",
    "batch",
    "curriculum",
    "skipping",
)


@dataclass(frozen=True)
class UserSettings:
    """All settings of the engine for a user's own module.

    Attributes:
        zero: what is sharded, and how it communicates.
        offload: what is kept in the host's memory or on disk.
        precision: the type of the weights, and the loss scale.
        logging: which monitors there are.
        profiling: whether to count the FLOPs of a step by module.
        extras: the optimizer, the schedule, and whatever else has no field in the tree.
        batch: the three batch sizes.
        clip_grad: the largest gradient norm; 0 is off.
        notes: warnings to print, about keys that have no effect.
        seqlen: the sequence length of each step, counted from 1, which the engine tells the module; None
            without a curriculum.
        layer_drop: the share of layers to keep, which the engine tells the module; None for all.
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


def choose_source(args: Any, config: JsonSource | None, config_params: JsonSource | None) -> JsonSource:
    """The one configuration among the arguments that may hold it.

    Raises:
        ConfigError: there is none, or more than one.
    """
    named = {
        "config": config,
        "config_params": config_params,
        "args.deepspeed_config": getattr(args, "deepspeed_config", None),
        "args.deepscale_config": getattr(args, "deepscale_config", None),
    }
    given = {name: source for name, source in named.items() if source is not None}
    if len(given) != 1:
        raise ConfigError(
            f"`config` must be given once, but is given {len(given)} times"
            f"{' (' + ', '.join(given) + ')' if given else ''}; pass a path or a dictionary as `config`"
        )
    return next(iter(given.values()))


def read_settings(source: JsonSource, data_parallel: int, model: nn.Module | None = None) -> UserSettings:
    """Read a JSON, or its content.

    Args:
        source: path or content.
        data_parallel: the number of ranks that samples are split over.
        model: its `config.hidden_size`, if it has one, resolves "auto" for the keys that depend on it; None
            if it is not known yet.

    Raises:
        ConfigError: names everything that is wrong with it.
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
    problems += sparse_faults(read.values.get("model.sparse_attention"), model)
    for name in _FOR_SCRIPTS_OF_OURS:
        if any(name in setting.source and setting.value is not False for setting in read.settings):
            problems.append(
                f"`{name}` must be off here, where a script has its own batches and layers, but is on; "
                "pretrain_gpt.py and pretrain_bert.py take it"
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
    if batch is None:  # no batch size is given, which this refuses as DeepSpeed does
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
        clip_grad=read.values.get("optimizer.clip_grad", CLIPPED),
        notes=(*notes, *_without_effect(read), *read.strangers),
        seqlen=seqlen,
        layer_drop=layer_drop_of(read.values),
    )


def _narrow_reduction(read: DeepSpeedSettings) -> tuple[str, ...]:
    """Take gradients that are sent as fp16 without a loss scale out of the settings; a warning about them.

    Our own scripts refuse them; DeepSpeed sends them, and so does the engine.
    """
    path = "zero.grad_reduce_dtype"
    if read.values.get(path) != "fp16" or read.values.get("precision.dtype") == "fp16":
        return ()
    read.settings[:] = [setting for setting in read.settings if setting.spec.path != path]
    return (
        f"`communication_data_type` of {read.name} is fp16 without a loss scale: a mean of gradients "
        "above 65504 is inf, and its step is skipped.",
    )


def _seqlen(section: CurriculumConfig) -> Pacing | ScriptLengths | None:
    """The sequence lengths of a curriculum; None if there is none."""
    if section.seqlen_schedule == "none":
        return None
    if section.seqlen_schedule == "custom":
        return ScriptLengths()
    last = section.seqlen_max_difficulty or max(section.seqlen_difficulty, default=None)
    lengths = None if last is None else section.seqlen(last)
    if lengths is None:
        raise ConfigError(
            "`curriculum_learning` must say how lengths grow, but does not; give `min_difficulty`, "
            "`max_difficulty` and `total_curriculum_step`, with `root_degree` for fixed_root, or for "
            "fixed_discrete growing levels in `difficulty` and the last steps of all but one in `max_step`"
        )
    return lengths


def _without_effect(read: DeepSpeedSettings) -> tuple[str, ...]:
    """One line on the keys that change nothing for the user's own module."""
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
