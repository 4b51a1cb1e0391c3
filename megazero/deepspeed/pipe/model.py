"""`PipelineModule`: a model as a sequence of layers, split into pipeline stages, and its engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megazero.config.deepspeed.load import load_ds_config
from megazero.deepspeed.config.settings import JsonSource, UserSettings, read_settings
from megazero.deepspeed.engine.arguments import params_of
from megazero.deepspeed.engine.assemble import Initialized, assemble
from megazero.deepspeed.engine.autocast import SECTION as AUTOCAST
from megazero.deepspeed.engine.state import UserArguments
from megazero.deepspeed.moe.experts import agreed_ep_size
from megazero.deepspeed.optimizers.fused import ParamGroups, Params
from megazero.deepspeed.pipe.engine import PipelineEngine
from megazero.deepspeed.pipe.module import PipelineStage
from megazero.deepspeed.pipe.ties import PipelineParallel, mark_tied, without_ends
from megazero.deepspeed.zero.parallel import UserParallel
from megazero.deepspeed.zero.sharding import ShardingPlan, build_parallel, prepare, user_units
from megazero.errors import ConfigError
from megazero.mpu.context import ParallelContext
from megazero.train.parts.chunks import DTYPES

_INTERVAL = "activation_checkpoint_interval"


class PipelineModule(PipelineStage):
    """A `PipelineStage` for `megazero.initialize`, which builds its `PipelineEngine`."""

    def make_engine(
        self, source: JsonSource, arguments: UserArguments, model_parameters: Params | None
    ) -> Initialized:
        """The results of `megazero.initialize`.

        `training_data` is read in its order. The JSON's ``pipeline.activation_checkpoint_interval`` overrides
        the module's if it is above 0.

        Raises:
            ConfigError: names everything that is wrong with the configuration or an argument.
        """
        if arguments.mpu is not None and arguments.mpu is not self.mpu():
            raise ConfigError(
                "`mpu` must be left out for a PipelineModule, which knows its topology, but is given"
            )
        source, interval, notes = _pipeline_section(source)
        context = without_ends(self.context)
        settings = read_settings(source, context.data.size, self)
        _check(self, settings)
        if interval:
            self.set_checkpoint_interval(interval)
        settings = replace(settings, notes=(*settings.notes, *notes))
        params: ParamGroups = params_of(self, model_parameters) or [{"params": []}]  # a stage may have none

        def tied(*parts: Any) -> PipelineParallel:
            parallel = PipelineParallel(*parts)
            parallel.tie(self.ties)
            return parallel

        def shard(plan: ShardingPlan, context: ParallelContext) -> UserParallel:
            weights = dict(self.named_parameters())
            partitions = prepare(self, weights, frozenset(), context, DTYPES[settings.precision.dtype])
            units = [replace(unit, chunk=self.stage_id) for unit in user_units(self, context.tp.size)]
            mark_tied(dict(self.tied_modules.items()), self.ties)
            return build_parallel(self, plan, context, partitions, units, tied)

        return assemble(self, params, settings, context, arguments, shard, PipelineEngine, is_stage=True)


def _pipeline_section(source: JsonSource) -> tuple[JsonSource, int, list[str]]:
    """Split off the section ``pipeline``: the other content, the checkpoint interval, and a note."""
    document = load_ds_config(source)
    section = document.get("pipeline")
    if not isinstance(section, Mapping):
        return source, 0, []
    interval = section.get(_INTERVAL, 0)
    if not isinstance(interval, int) or interval < 0:
        raise ConfigError(
            f"`pipeline.{_INTERVAL}` must be a number of layers, but is {interval!r}; 0 is none"
        )
    rest = [f"pipeline.{key}" for key in section if key != _INTERVAL]
    notes = [f"keys without effect here: {', '.join(rest)} (arguments of PipelineModule say it)."]
    content = {key: value for key, value in document.items() if key != "pipeline"}
    return content, interval, notes if rest else []


def _check(module: PipelineStage, settings: UserSettings) -> None:
    """Refuse settings that a pipeline does not support."""
    problems = []
    if agreed_ep_size(module) > 1:
        problems.append("`ep_size` must be 1 in a PipelineModule, but is more; give each rank all experts")
    if settings.zero.hpz_partition_size > 1:
        problems.append("`zero_hpz_partition_size` must be 1 in a PipelineModule, but is more; leave it out")
    if settings.layer_drop is not None:
        problems.append(
            "`progressive_layer_drop` must be off for a PipelineModule, but is on; layers can drop themselves"
        )
    if settings.seqlen is not None:
        problems.append(
            "`curriculum_learning` must be off for a PipelineModule, but is on; cut the samples in "
            "`engine.set_batch_fn`, as any shape is sent"
        )
    if AUTOCAST in settings.extras.sections:
        problems.append("`torch_autocast` must be off for a PipelineModule, but is on; use `bf16`")
    if problems:
        raise ConfigError(problems)
