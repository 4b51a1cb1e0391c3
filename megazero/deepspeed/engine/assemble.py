"""`assemble`: an engine of its parts, for a model that is one module and for a stage of a pipeline."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer as TorchOptimizer
from torch.utils.data import DataLoader

from megazero.deepspeed.config.settings import UserSettings
from megazero.deepspeed.engine.arguments import check_groups
from megazero.deepspeed.engine.report import Reporter
from megazero.deepspeed.engine.state import EngineState, Given
from megazero.deepspeed.engine.tenancy import Tenancy, end_tenancies
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
from megazero.deepspeed.zero.sharding import Sharding, group_numbers
from megazero.mpu.context import ParallelContext
from megazero.mpu.traffic import TrafficLog, count_traffic
from megazero.zero.optimizer import Optimizer
from megazero.zero.policy import ZeroPolicy
from megazero.zero.store.choose import store_kind

Engine = tuple[Any, DeepSpeedOptimizer | None, DataLoader[Any] | None, Any]
"""What `initialize` returns: the engine, its optimizer, its dataloader and its schedule."""


def assemble(
    model: nn.Module,
    params: Sequence[Any],
    settings: UserSettings,
    context: ParallelContext,
    given: Given,
    shard: Callable[[Sharding, ParallelContext], UserParallel],
    kind: Callable[..., Any],
    *,
    part: bool = False,
) -> Engine:
    """Take a model from its earlier engines, and build its next one with the optimizer that a script wants.

    Args:
        model: the model, or this rank's stage.
        params: parameters or parameter groups for the JSON's optimizer.
        settings: what the JSON says.
        context: this rank's groups and device.
        given: the script's arguments.
        shard: moves the model's parameters into buckets.
        kind: makes the engine.
        part: whether other ranks have other parameters, so that one without any trains nevertheless.

    Raises:
        ConfigError: a parameter is in two groups, or the optimizer cannot be followed.
    """
    if context.rank == 0:
        for note in settings.notes:
            print(f"warning: {note}", file=sys.stderr, flush=True)
    traffic = TrafficLog() if settings.logging.comms_logger else None
    context = context if traffic is None else count_traffic(context, traffic)
    end_tenancies(model)
    tenancy = Tenancy(model)
    named = settings.extras.optimizer
    if named is not None and named.type.lower() == MUON_OPTIMIZER:
        mark_matrices(model)
    client = build_torch_optimizer(given.optimizer, params, settings.extras)
    if client is None:
        client = idle_optimizer()
    elif not part:
        check_groups(client)
    if not client.param_groups:
        tenancy.freeze()
    states = _optimize(model, client, settings, context, shard)
    if states.idle:
        tenancy.thaw()
    tenancy.begin(states.parallel, context)
    schedule = None
    if not states.idle:
        schedule = build_schedule(given.lr_scheduler, settings.extras.scheduler, states, client)
    reporter = Reporter(settings, context, traffic)
    engine = kind(EngineState(model, states, settings, context, schedule, reporter, given))
    engine.stay(tenancy)
    return engine, engine.optimizer, engine.training_dataloader, schedule


def _optimize(
    model: nn.Module,
    client: TorchOptimizer,
    settings: UserSettings,
    context: ParallelContext,
    shard: Callable[[Sharding, ParallelContext], UserParallel],
) -> DeepSpeedOptimizer:
    """Shard the model's parameters and put an optimizer over them."""
    extras = settings.extras
    rule_of = choose_rule(client) if client.param_groups else idle_rule
    rule = rule_of(client.param_groups)
    policy = ZeroPolicy.of(settings.zero, settings.offload, rule.needs)
    groups, whole = group_numbers(model, client.param_groups), matrix_groups(client)
    kind = store_kind(settings.offload, context)
    parallel = shard(Sharding(client, policy, groups, whole, kind), context)
    shards = Optimizer(parallel.store, rule, context, settings.clip_grad)
    scaler = build_deepspeed_scaler(settings.precision, consecutive=extras.consecutive_hysteresis)
    shown = settings.zero.stage == 0 and settings.precision.dtype == "fp32"  # then gradients are means
    narrow = "fp16" in (settings.zero.grad_reduce_dtype, settings.zero.grad_accumulation_dtype)
    # The more ranks, the sooner their sums overflow in fp16; means do not.
    means = extras.prescale_gradients or shown or (narrow and extras.gradient_predivide_factor == 1.0)
    divisor = float(context.replica.size) if means else extras.gradient_predivide_factor
    return DeepSpeedOptimizer(client, rule_of, parallel, shards, scaler, divisor)
