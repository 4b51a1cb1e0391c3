"""`megazero.initialize`: the engine for the user's own model, with DeepSpeed's JSON and names."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

from torch import nn
from torch.optim import Optimizer as TorchOptimizer
from torch.utils.data import DataLoader, Dataset

from megazero.config.deepspeed.read import read_deepspeed
from megazero.deepspeed.adopt import TIMEOUT, find_context
from megazero.deepspeed.data import build_dataloader
from megazero.deepspeed.engine import DeepSpeedEngine
from megazero.deepspeed.inference.hybrid import SECTION as HYBRID
from megazero.deepspeed.inference.hybrid import engine_kind
from megazero.deepspeed.moe.experts import agreed_ep_size, check_ep_size, share_experts, without
from megazero.deepspeed.muon import matrix_groups
from megazero.deepspeed.optimizer import DeepSpeedOptimizer, build_torch_optimizer
from megazero.deepspeed.parallel import build_parallel, group_numbers, prepare
from megazero.deepspeed.report import Reporter
from megazero.deepspeed.schedules import build_schedule
from megazero.deepspeed.settings import JsonSource, UserSettings, choose_source, read_settings
from megazero.deepspeed.tensor_parallel.training import TensorParallelRequest, take_section
from megazero.deepspeed.torch_rule import choose_rule
from megazero.errors import ConfigError
from megazero.mpu.context import ParallelContext
from megazero.mpu.traffic import TrafficLog, count_traffic
from megazero.optim.loss_scaler import build_loss_scaler
from megazero.train.parts.chunks import DTYPES
from megazero.zero.optimizer import Optimizer
from megazero.zero.policy import ZeroPolicy
from megazero.zero.store.choose import store_kind


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: TorchOptimizer | Callable[[Any], TorchOptimizer] | None = None,
    model_parameters: Iterable[nn.Parameter] | Iterable[dict[str, Any]] | None = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: Any | Callable[[TorchOptimizer], Any] | None = None,
    *,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: JsonSource | None = None,
    config_params: JsonSource | None = None,
) -> tuple[DeepSpeedEngine, DeepSpeedOptimizer, DataLoader[Any] | None, Any]:
    """Wrap a model for training as a DeepSpeed JSON says; every rank calls this.

    Initial weights are those of the first data-parallel rank. A learning rate schedule that was built on
    `optimizer` before keeps working: both share their parameter groups.

    Args:
        args: its `deepspeed_config` is the configuration if `config` is not given.
        model: any module, built as usual or within `zero.Init`.
        optimizer: a torch optimizer of its parameters, or a function that makes one from `model_parameters`;
            takes precedence over the JSON's.
        model_parameters: parameters or parameter groups for the JSON's optimizer; default: all trained ones.
        training_data: a dataset, which is split over the ranks in micro-batches.
        lr_scheduler: a schedule, or a function that makes one from the optimizer; takes precedence over the
            JSON's.
        mpu: see `find_context`.
        dist_init_required: False refuses to join the world of ranks here.
        collate_fn: collates samples for the dataloader.
        config: path of the JSON, or its content.
        config_params: another name for `config`.

    Returns:
        The engine, its optimizer, the dataloader of `training_data` or None, and the schedule or None.

    Raises:
        ConfigError: names everything that is wrong with the configuration or an argument.
        CommunicationError: the other ranks could not be reached.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"`model` must be a torch.nn.Module, but is a {type(model).__name__}")
    section, source = take_section(choose_source(args, config, config_params))
    request = TensorParallelRequest.read(section)
    section, source = take_section(source, HYBRID)
    kind = engine_kind(section)
    read = read_deepspeed(source).values
    request = request.within(model, DTYPES[read.get("precision.dtype", "fp32")])
    sizes = {"node_size": read.get("zero.hpz_partition_size", 1), "ep_size": agreed_ep_size(model)}
    context = find_context(request.layout(mpu), **sizes, may_start=dist_init_required is not False)
    check_ep_size(model, context)
    settings = read_settings(source, request.shares(mpu, context), model)
    _check(settings, context)
    request.apply(model, context)
    if context.rank == 0:
        for note in settings.notes:
            print(f"warning: {note}", file=sys.stderr, flush=True)
    traffic = TrafficLog() if settings.logging.comms_logger else None
    counted = context if traffic is None else count_traffic(context, traffic)
    if model_parameters is None:
        model_parameters = (param for param in model.parameters() if param.requires_grad)
    params: list[Any] = list(model_parameters)
    client = build_torch_optimizer(optimizer, params, settings.extras)
    client.param_groups[:] = [group for group in client.param_groups if group["params"]]
    wrapped = _shard(model, client, settings, counted)
    schedule = build_schedule(lr_scheduler, settings.extras.scheduler, wrapped)
    loader = None
    if training_data is not None:
        drop_last = settings.extras.dataloader_drop_last
        loader = build_dataloader(training_data, collate_fn, settings.batch.micro, drop_last, context)
    reporter = Reporter(settings, context, traffic)
    engine = kind(model, wrapped, settings, context, schedule, reporter, loader)
    return engine, wrapped, loader, schedule


def _check(settings: UserSettings, context: ParallelContext) -> None:
    """Refuse settings that an engine of one module cannot follow.

    Raises:
        ConfigError: there are pipeline stages, or a second partition for which the ranks have no groups.
    """
    if context.pp.size > 1:
        raise ConfigError(
            f"`pipeline parallel size` must be 1 for a model that is one module, but `mpu` says "
            f"{context.pp.size}; use a training script such as pretrain_gpt.py for pipelines"
        )
    hpz = settings.zero.hpz_partition_size
    if hpz > 1 and context.node.size != hpz:
        raise ConfigError(
            f"`zero_hpz_partition_size` must be the size of the group of replicas on a node "
            f"({context.node.size}), but is {hpz}; build the context with that `node_size`"
        )


def _shard(
    model: nn.Module, client: TorchOptimizer, settings: UserSettings, context: ParallelContext
) -> DeepSpeedOptimizer:
    """Move the model's parameters into buckets and put an optimizer over them."""
    extras = settings.extras
    rule_of = choose_rule(client, allow_untested=extras.zero_allow_untested_optimizer)
    rule = rule_of(client.param_groups)
    whole = matrix_groups(client)
    policy = ZeroPolicy.of(settings.zero, settings.offload, rule.needs)
    numbers = group_numbers(model, client.param_groups)
    params = dict(model.named_parameters())
    gone = share_experts(model, context)
    without(client.param_groups, gone)
    homes = prepare(model, params, gone, context, DTYPES[settings.precision.dtype])
    kind = store_kind(settings.offload, context.device)
    parallel = build_parallel(model, policy, context, homes, numbers, kind, whole)
    shards = Optimizer(parallel.store, rule, context, settings.clip_grad)
    return DeepSpeedOptimizer(
        client,
        rule_of,
        parallel,
        shards,
        build_loss_scaler(settings.precision),
        float(context.replica.size) if extras.prescale_gradients else extras.gradient_predivide_factor,
    )


def init_distributed(dist_backend: str | None = None, timeout: timedelta = TIMEOUT) -> None:
    """Join the world of ranks that the launcher's environment describes, unless already joined.

    Args:
        dist_backend: nccl or gloo; by default the device decides.
        timeout: longest wait in one collective.

    Raises:
        CommunicationError: the other ranks could not be reached.
    """
    find_context(backend=dist_backend, timeout=timeout)


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--deepspeed` and `--deepspeed_config`, which `initialize` reads from `args`."""
    group = parser.add_argument_group("DeepSpeed")
    group.add_argument(
        "--deepspeed", action="store_true", help="for the script to read; changes nothing here"
    )
    group.add_argument(
        "--deepspeed_config", metavar="FILE", help="DeepSpeed JSON that configures the training"
    )
    return parser
