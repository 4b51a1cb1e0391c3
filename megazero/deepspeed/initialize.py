"""`megazero.initialize`: build the engine for a user's model from a DeepSpeed JSON."""

from __future__ import annotations

import argparse

from torch import nn
from torch.utils.data import Dataset

from megazero.config.deepspeed.load import load_ds_config
from megazero.config.deepspeed.read import read_deepspeed
from megazero.deepspeed.accelerator.choose import get_accelerator
from megazero.deepspeed.asserted import asserts
from megazero.deepspeed.comm.adopt import find_context
from megazero.deepspeed.config.settings import JsonSource, UserSettings, choose_source, read_settings
from megazero.deepspeed.engine.arguments import Mesh, check_local_rank, mesh_of, params_of, readable
from megazero.deepspeed.engine.assemble import Initialized, assemble
from megazero.deepspeed.engine.autocast import Autocast
from megazero.deepspeed.engine.data import Collate
from megazero.deepspeed.engine.hybrid import SECTION as HYBRID
from megazero.deepspeed.engine.hybrid import engine_kind
from megazero.deepspeed.engine.state import UserArguments
from megazero.deepspeed.moe.experts import agreed_ep_size, check_ep_size, share_experts, without
from megazero.deepspeed.optimizers.fused import Params
from megazero.deepspeed.optimizers.optimizer import UserOptimizer
from megazero.deepspeed.sequence.state import for_sequences
from megazero.deepspeed.tensor_parallel.training import SECTION as TENSOR_PARALLEL
from megazero.deepspeed.tensor_parallel.training import TensorParallelRequest
from megazero.deepspeed.zero.leaf_modules import apply_leaf_settings
from megazero.deepspeed.zero.parallel import UserParallel
from megazero.deepspeed.zero.sharding import ShardingPlan, build_parallel, prepare, user_units
from megazero.errors import ConfigError
from megazero.mpu.context import ParallelContext
from megazero.mpu.malloc import keep_freed_memory
from megazero.train.parts.chunks import DTYPES


@asserts
def initialize(
    args: object = None,
    model: nn.Module | None = None,
    optimizer: UserOptimizer | None = None,
    model_parameters: Params | None = None,
    training_data: Dataset[object] | None = None,
    lr_scheduler: object = None,
    distributed_port: int = 29500,
    mpu: object = None,
    dist_init_required: bool | None = None,
    collate_fn: Collate | None = None,
    config: JsonSource | None = None,
    mesh_param: tuple[int, int] | None = None,
    config_params: JsonSource | None = None,
) -> Initialized:
    """Build the engine that trains a model by a DeepSpeed JSON; every rank calls this.

    All replicas start from the weights of the first data-parallel rank. A learning rate schedule that was
    built on `optimizer` before keeps working, because the engine uses the same parameter groups. An earlier
    engine of the model is detached and can no longer train. On a CPU, the process keeps the memory that it
    frees from now on (see `keep_freed_memory`).

    Args:
        args: the script's parsed arguments: `deepspeed_config` is the configuration if `config` is None;
            `local_rank` is set to the launcher's, and must not be another rank's before.
        model: any module, built as usual or within `zero.Init`.
        optimizer: a torch optimizer of the model's parameters, or a function that makes one of
            `model_parameters`; takes precedence over the JSON's. Without either, the engine only evaluates.
        model_parameters: parameters or parameter groups for the optimizer; by default all trained parameters.
        training_data: the dataset; the engine makes a dataloader of each rank's samples.
        lr_scheduler: a schedule, or a function that makes one of the torch optimizer; takes precedence over
            the JSON's.
        distributed_port: has no effect; the launcher chooses the port.
        mpu: see `find_context`.
        dist_init_required: False forbids joining the world of ranks here.
        collate_fn: collates samples for the dataloader.
        config: the JSON: its path, its content, its content as base64, or a `DeepSpeedConfig`.
        mesh_param: the data-parallel and the sequence-parallel size; by default the JSON's
            `data_parallel_size` and `sequence_parallel_size`.
        config_params: another name for `config`.

    Returns:
        The engine, its optimizer, the dataloader of `training_data`, and the schedule; all but the engine may
        be None.

    Raises:
        ConfigError: names everything that is wrong with the configuration or an argument.
        CommunicationError: the other ranks could not be reached.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"`model` must be a torch.nn.Module, but is a {type(model).__name__}")
    if get_accelerator().device_name() == "cpu":
        keep_freed_memory()
    source = readable(choose_source(args, config, config_params))
    check_local_rank(args)
    mpu = mpu if mpu is not None or mesh_param is None else Mesh(*mesh_param)
    arguments = UserArguments(load_ds_config(source), optimizer, lr_scheduler, mpu, training_data, collate_fn)
    if (make_engine := getattr(model, "make_engine", None)) is not None:  # the model is a `PipelineModule`
        return make_engine(source, arguments, model_parameters)  # type: ignore[no-any-return]
    return _build(model, source, arguments, model_parameters, may_start=dist_init_required is not False)


def _build(
    model: nn.Module,
    source: JsonSource,
    arguments: UserArguments,
    model_parameters: Params | None,
    *,
    may_start: bool,
) -> Initialized:
    """Build the engine of a model that is no pipeline; `may_start` allows it to join the world."""
    read = read_deepspeed(source)
    request = TensorParallelRequest.read(read.extras.sections.get(TENSOR_PARALLEL, {}))
    kind = engine_kind(read.extras.sections.get(HYBRID, {}))
    values, mpu = read.values, mesh_of(read.extras) if arguments.mpu is None else arguments.mpu
    request = request.within(model, DTYPES[values.get("precision.dtype", "fp32")])
    sizes = {"node_size": values.get("zero.hpz_partition_size", 1), "ep_size": agreed_ep_size(model)}
    context = find_context(request.layout(mpu), **sizes, may_start=may_start)
    check_ep_size(model, context)
    if isinstance(mpu, Mesh):
        mpu.check(context.data.size)
    settings = for_sequences(read_settings(source, request.shares(mpu, context), model), context)
    _check(settings, context)
    request.apply(model, context)

    def shard(plan: ShardingPlan, context: ParallelContext) -> UserParallel:
        params = dict(model.named_parameters())
        gone = share_experts(model, context)
        without(plan.client.param_groups, gone)
        partitions = prepare(model, params, gone, context, DTYPES[settings.precision.dtype])
        if plan.policy.stage == 3:
            apply_leaf_settings(model, settings.extras.sections.get("leaf_module"))
        return build_parallel(model, plan, context, partitions, user_units(model, context.tp.size))

    return assemble(model, params_of(model, model_parameters), settings, context, arguments, shard, kind)


def _check(settings: UserSettings, context: ParallelContext) -> None:
    """Refuse settings that the engine of one module does not support."""
    if context.pp.size > 1:
        raise ConfigError(
            f"`pipeline parallel size` must be 1 for a model that is one module, but `mpu` says "
            f"{context.pp.size}; use a training script such as pretrain_gpt.py for pipelines"
        )
    Autocast.of(settings)
    hpz = settings.zero.hpz_partition_size
    if hpz > 1 and context.node.size != hpz:
        raise ConfigError(
            f"`zero_hpz_partition_size` must be the size of the group of replicas on a node "
            f"({context.node.size}), but is {hpz}; build the context with that `node_size`"
        )


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--deepspeed`, `--deepspeed_config` and their older names; `initialize` reads the configuration."""
    group = parser.add_argument_group("DeepSpeed")
    group.add_argument("--deepspeed", action="store_true", help="for the script to read; has no effect here")
    group.add_argument(
        "--deepspeed_config", metavar="FILE", help="DeepSpeed JSON that configures the training"
    )
    group.add_argument("--deepscale", action="store_true", help="older name of --deepspeed")
    group.add_argument("--deepscale_config", metavar="FILE", help="older name of --deepspeed_config")
    return parser
