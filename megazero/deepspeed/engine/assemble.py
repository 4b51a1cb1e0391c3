"""`assemble`: build an engine on a whole model, or on one stage of a pipeline."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer as TorchOptimizer
from torch.utils.data import DataLoader

from megazero.deepspeed.config.settings import UserSettings
from megazero.deepspeed.engine.arguments import check_groups
from megazero.deepspeed.engine.attachment import Attachment, detach_engines
from megazero.deepspeed.engine.engine import DeepSpeedEngine
from megazero.deepspeed.engine.report import Reporter
from megazero.deepspeed.engine.state import EngineState, UserArguments
from megazero.deepspeed.optimizers.fused import ParamGroups
from megazero.deepspeed.optimizers.loss_scale import build_deepspeed_scaler
from megazero.deepspeed.optimizers.muon import MUON_OPTIMIZER, mark_matrices, matrix_groups
from megazero.deepspeed.optimizers.optimizer import (
    DeepSpeedOptimizer,
    build_torch_optimizer,
    idle_optimizer,
    idle_rule,
)
from megazero.deepspeed.optimizers.torch_rule import choose_rule
from megazero.deepspeed.schedules.choose import build_schedule
from megazero.deepspeed.zero.parallel import UserParallel
from megazero.deepspeed.zero.sharding import ShardingPlan, group_numbers
from megazero.mpu.context import ParallelContext
from megazero.mpu.traffic import TrafficLog, count_traffic
from megazero.zero.optimizer import Optimizer
from megazero.zero.policy import ZeroPolicy
from megazero.zero.store.choose import store_kind

Initialized = tuple[DeepSpeedEngine, DeepSpeedOptimizer | None, DataLoader[object] | None, Any]
"""What `initialize` returns: the engine, its optimizer, its dataloader and its schedule."""

Shard = Callable[[ShardingPlan, ParallelContext], UserParallel]
"""Moves the parameters of a model into buckets."""


def assemble(
    model: nn.Module,
    params: ParamGroups,
    settings: UserSettings,
    context: ParallelContext,
    arguments: UserArguments,
    shard: Shard,
    kind: type[DeepSpeedEngine],
    *,
    is_stage: bool = False,
) -> Initialized:
    """Build an engine with its optimizer and schedule on a model; engines that the model had let go of it.

    Args:
        model: the model, or this rank's stage.
        params: parameters or parameter groups for the JSON's optimizer.
        settings: the settings of the JSON.
        context: this rank's groups and device.
        arguments: the script's arguments.
        shard: moves the model's parameters into buckets.
        kind: the class of the engine.
        is_stage: whether the model is one stage of a pipeline; a stage without parameters trains too.

    Raises:
        ConfigError: a parameter is in two groups, or the optimizer cannot run on shards.
    """
    if context.rank == 0:
        for note in settings.notes:
            print(f"warning: {note}", file=sys.stderr, flush=True)
    traffic = TrafficLog() if settings.logging.comms_logger else None
    context = context if traffic is None else count_traffic(context, traffic)
    detach_engines(model)
    attachment = Attachment(model)
    named = settings.extras.optimizer
    if named is not None and named.type.lower() == MUON_OPTIMIZER:
        mark_matrices(model)
    client = build_torch_optimizer(arguments.optimizer, params, settings.extras)
    if client is None:
        client = idle_optimizer()
    elif not is_stage:
        check_groups(client)
    if not client.param_groups:
        attachment.freeze()
    states = _optimize(model, client, settings, context, shard)
    if states.idle:
        attachment.thaw()
    attachment.begin(states.parallel, context)
    schedule = None
    if not states.idle:
        schedule = build_schedule(arguments.lr_scheduler, settings.extras.scheduler, states, client)
    reporter = Reporter(settings, context, traffic)
    engine = kind(EngineState(model, states, settings, context, schedule, reporter, arguments))
    engine.attach(attachment)
    return engine, engine.optimizer, engine.training_dataloader, schedule


def _optimize(
    model: nn.Module,
    client: TorchOptimizer,
    settings: UserSettings,
    context: ParallelContext,
    shard: Shard,
) -> DeepSpeedOptimizer:
    """Shard the model's parameters and build the optimizer over the shards."""
    extras = settings.extras
    rule_of = choose_rule(client) if client.param_groups else idle_rule
    rule = rule_of(client.param_groups)
    policy = ZeroPolicy.of(settings.zero, settings.offload, rule.needs)
    groups, whole = group_numbers(model, client.param_groups), matrix_groups(client)
    kind = store_kind(settings.offload, context)
    parallel = shard(ShardingPlan(client, policy, groups, whole, kind), context)
    shards = Optimizer(parallel.store, rule, context, settings.clip_grad)
    scaler = build_deepspeed_scaler(settings.precision, consecutive=extras.consecutive_hysteresis)
    # A script sees the gradients of stage 0 in fp32 themselves, so they must be means.
    shown = settings.zero.stage == 0 and settings.precision.dtype == "fp32"
    narrow = "fp16" in (settings.zero.grad_reduce_dtype, settings.zero.grad_accumulation_dtype)
    # Sums over many ranks overflow in fp16; means do not.
    means = extras.prescale_gradients or shown or (narrow and extras.gradient_predivide_factor == 1.0)
    divisor = float(context.replica.size) if means else extras.gradient_predivide_factor
    return DeepSpeedOptimizer(client, rule_of, parallel, shards, scaler, divisor)
