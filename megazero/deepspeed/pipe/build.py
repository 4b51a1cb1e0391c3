"""`make_engine`: what `megazero.initialize` does with a `PipelineModule`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn
from torch.optim import Optimizer as TorchOptimizer

from megazero.deepspeed.answers import Given
from megazero.deepspeed.arguments import params_of
from megazero.deepspeed.choose_schedule import build_schedule
from megazero.deepspeed.loss_scale import build_deepspeed_scaler
from megazero.deepspeed.moe.experts import agreed_ep_size
from megazero.deepspeed.muon import matrix_groups
from megazero.deepspeed.optimizer import (
    DeepSpeedOptimizer,
    build_torch_optimizer,
    idle_optimizer,
    idle_rule,
)
from megazero.deepspeed.parallel import group_numbers, prepare
from megazero.deepspeed.pipe.engine import PipelineEngine
from megazero.deepspeed.pipe.module import PipelineStage
from megazero.deepspeed.pipe.ties import PipelineParallel, mark_tied, without_ends
from megazero.deepspeed.report import Reporter
from megazero.deepspeed.settings import JsonSource, UserSettings, read_settings
from megazero.deepspeed.tenancy import Tenancy, end_tenancies
from megazero.deepspeed.torch_rule import choose_rule
from megazero.deepspeed.units import user_units
from megazero.deepspeed.utils.configs import load_ds_config
from megazero.errors import ConfigError
from megazero.mpu.context import ParallelContext
from megazero.mpu.matrices import Matrices
from megazero.mpu.param_spec import spec_of
from megazero.mpu.traffic import TrafficLog, count_traffic
from megazero.train.parts.chunks import DTYPES
from megazero.zero.build import build_store
from megazero.zero.optimizer import Optimizer
from megazero.zero.policy import ZeroPolicy
from megazero.zero.store.choose import store_kind

_INTERVAL = "activation_checkpoint_interval"


def make_engine(
    module: PipelineStage, source: JsonSource, given: Given, model_parameters: Any
) -> tuple[PipelineEngine, DeepSpeedOptimizer | None, Any, Any]:
    """The engine of a pipeline, its optimizer, the loader of `training_data` and the schedule.

    See `megazero.initialize`. The stages are those of the module, so `mpu` is left out. `training_data` is
    read in its order. The JSON's ``pipeline.activation_checkpoint_interval`` overrides the module's if it is
    above 0.

    Raises:
        ConfigError: names everything that is wrong with the configuration or an argument.
    """
    if given.mpu is not None and given.mpu is not module.mpu():
        raise ConfigError(
            "`mpu` must be left out for a PipelineModule, which knows its topology, but is given"
        )
    source, interval, notes = _pipeline_section(source)
    context = without_ends(module.context)
    settings = read_settings(source, context.data.size, module)
    _check(module, settings)
    if interval:
        module.set_checkpoint_interval(interval)
    if context.rank == 0:
        for note in (*settings.notes, *notes):
            print(f"warning: {note}", file=sys.stderr, flush=True)
    traffic = TrafficLog() if settings.logging.comms_logger else None
    counted = context if traffic is None else count_traffic(context, traffic)
    end_tenancies(module)
    tenancy = Tenancy(module)
    params = params_of(module, model_parameters) or [{"params": []}]  # a stage may have none
    client = build_torch_optimizer(given.optimizer, params, settings.extras)
    if client is None:
        tenancy.freeze()
    states = _shard(module, client or idle_optimizer(), settings, counted, given)
    if states.idle:
        tenancy.thaw()
    tenancy.begin(states.parallel, context)
    schedule = None
    if client is not None:
        schedule = build_schedule(given.lr_scheduler, settings.extras.scheduler, states, client)
    reporter = Reporter(settings, context, traffic)
    engine = PipelineEngine(module, states, settings, counted, schedule, reporter, given)
    engine.stay(tenancy)
    return engine, engine.optimizer, engine.training_dataloader, schedule


def _pipeline_section(source: JsonSource) -> tuple[JsonSource, int, list[str]]:
    """A configuration without its section ``pipeline``, the interval that this names, and a note on the rest.

    Raises:
        ConfigError: the interval is no number of layers.
    """
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
    notes = (
        [f"keys without effect here: {', '.join(rest)} (arguments of PipelineModule say it)."] if rest else []
    )
    return {key: value for key, value in document.items() if key != "pipeline"}, interval, notes


def _check(module: PipelineStage, settings: UserSettings) -> None:
    """Refuse settings that a pipeline cannot follow.

    Raises:
        ConfigError: there are experts that ranks share, a second partition, a curriculum of lengths, or
            layers to drop.
    """
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
    if problems:
        raise ConfigError(problems)


def _shard(
    module: PipelineStage,
    client: TorchOptimizer,
    settings: UserSettings,
    context: ParallelContext,
    given: Given,
) -> DeepSpeedOptimizer:
    """Move this stage's parameters into buckets and put an optimizer over them."""
    extras = settings.extras
    untested = extras.zero_allow_untested_optimizer
    rule_of = choose_rule(client, allow_untested=untested) if client.param_groups else idle_rule
    rule = rule_of(client.param_groups)
    policy = ZeroPolicy.of(settings.zero, settings.offload, rule.needs)
    numbers, whole = group_numbers(module, client.param_groups), matrix_groups(client)
    params = dict(module.named_parameters())
    homes = prepare(module, params, frozenset(), context, DTYPES[settings.precision.dtype])

    def fill(params: Sequence[nn.Parameter]) -> None:
        for param in params:
            param.data.copy_(homes[id(param)].whole())

    units = [replace(unit, chunk=module.stage_id) for unit in user_units(module, context.tp.size)]
    for param in module.parameters():
        if numbers.get(id(param)) in whole:
            param.__dict__["spec"] = replace(spec_of(param), matrices=Matrices())
    mark_tied(dict(module.tied_modules.items()), module.ties)
    kind = store_kind(settings.offload, context.device)
    store = build_store(units, policy, context, fill, numbers, kind)
    parallel = PipelineParallel(module, units, store, policy, context)
    parallel.tie(module.ties)
    divisor = float(context.replica.size) if extras.prescale_gradients else extras.gradient_predivide_factor
    shards = Optimizer(store, rule, context, settings.clip_grad)
    scaler = build_deepspeed_scaler(settings.precision, consecutive=extras.consecutive_hysteresis)
    return DeepSpeedOptimizer(client, rule_of, parallel, shards, scaler, divisor)
