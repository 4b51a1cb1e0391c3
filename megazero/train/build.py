"""Builds the engine of a run: this rank's chunks, their optimizer, loss scale and schedules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from megazero.config.derive import PipelineShape
from megazero.config.training_plan import TrainingPlan
from megazero.config.tree.config import Config
from megazero.errors import ConfigError
from megazero.layers.compiled import compile_layers
from megazero.layers.fp8 import Fp8State, use_fp8
from megazero.layers.graphed import CudaGraphs, graph_layers
from megazero.layers.initialize import initialize_parameters
from megazero.layers.linear import sum_in_products
from megazero.models.objective import LossChange
from megazero.moe.loads import RouterLoads
from megazero.mpu.context import ParallelContext
from megazero.mpu.param_spec import spec_of
from megazero.ops.product_sum import working_blas
from megazero.optim.build import build_update_rule
from megazero.optim.loss_scaler import build_loss_scaler
from megazero.optim.schedule import UpdateSchedule
from megazero.pipeline.chunk import Chunk
from megazero.pipeline.executor import Executor
from megazero.train.parts.chunks import Chunks, build_chunks, programs_of
from megazero.train.parts.vocabulary import Vocabulary
from megazero.train.resume.teacher import load_teacher
from megazero.train.step.distillation import Distillation, Teacher
from megazero.train.step.engine import Engine, LayerState, Schedules
from megazero.train.step.skipping import SkippingPlan
from megazero.zero.build import aligned_multiple, build_store
from megazero.zero.delayed import DelayedUpdates
from megazero.zero.optimizer import Optimizer
from megazero.zero.parallel import DataParallel
from megazero.zero.policy import ZeroPolicy
from megazero.zero.store.choose import store_kind
from megazero.zero.store.offload import OffloadStore
from megazero.zero.unit import Unit

if TYPE_CHECKING:
    from megazero.pipeline.chunk import Sharding

    _: type[Sharding] = DataParallel


_EMBEDDING_AND_HEAD = ("embedding.word.weight", "head.weight")


def _second_group(units: Sequence[Unit]) -> dict[int, int]:
    """Map the ``id`` of the word embedding and the output head to parameter group 1, as in Megatron-LM."""
    params = (param for unit in units for param in unit.params)
    specs = ((param, spec_of(param)) for param in params)  # a copy on another stage has its own name
    return {id(p): 1 for p, spec in specs if (spec.tied_with or spec.name) in _EMBEDDING_AND_HEAD}


def build_engine(
    config: Config,
    training_plan: TrainingPlan,
    chunks: Chunks,
    context: ParallelContext,
    teacher: Teacher | None = None,
    objective: LossChange | None = None,
) -> Engine:
    """Build the engine of this rank's chunks, with optimizer, loss scale and schedules.

    Parameters on the meta device are allocated and initialized here, unit by unit.

    Args:
        objective: what to minimize instead of the model's own loss.
    """
    check_device(config, context.device)
    distillation = Distillation.of(config.distillation, chunks, teacher)
    blocks = [block for chunk in chunks.values() for block in chunk.blocks()]
    whole = config.zero.stage < 3
    scalings = use_fp8(blocks, config.precision, config.model.num_layers, context.device, keeps=whole)
    if config.acceleration.compile:
        compile_layers(blocks, config.acceleration.compile_backend)
    if config.acceleration.cuda_graph:
        graph_layers(blocks, CudaGraphs())
    rule = build_update_rule(config.optimizer)
    policy = ZeroPolicy.of(config.zero, config.offload, rule.needs, config.training.seed)
    units = [
        Unit(number, block, tuple(block.parameters()))
        for number, chunk in chunks.items()
        for block in chunk.blocks()
    ]
    fill = partial(initialize_parameters, seed=config.training.seed, place=context.place)
    kind, multiple = store_kind(config.offload, context), aligned_multiple(context.device)
    schedule = UpdateSchedule.of(config.optimizer, training_plan)
    groups = {} if schedule.decoupled_rate is None else _second_group(units)
    store = build_store(units, policy, context, fill, groups, kind, multiple)
    delayed = None
    if config.offload.delayed_param_update:
        assert isinstance(store, OffloadStore), "rules ask for offloaded state"
        delayed = DelayedUpdates(store, config.offload.delayed_param_update_start)
    # Late gathers are safe here: only a block's forward reads its weights after an update.
    sharding = DataParallel(units, store, policy, context, late=config.zero.overlap_param_gather)
    # Compiled and graphed layers cannot hand gradients over as products.
    graphed = config.acceleration.compile or config.acceleration.cuda_graph
    if not graphed and (blas := working_blas(context.device)) is not None:
        sum_in_products(blocks, sharding.collect, blas)
    run: Mapping[int, Chunk[Any]] = distillation.beside(chunks)
    if objective is not None:
        run = {number: objective.on_chunk(chunk) for number, chunk in chunks.items()}
    executor = Executor(run, context.pp, sharding, context.device)
    engine = Engine(
        executor,
        programs_of(config.zero, PipelineShape.of(config)),
        Optimizer(store, rule, context, config.optimizer.clip_grad, delayed),
        build_loss_scaler(config.precision),
        Schedules(
            schedule,
            SkippingPlan.of(config.skipping, config.model.num_layers, config.training.seed, training_plan),
        ),
        LayerState(
            RouterLoads(
                [router for chunk in chunks.values() for router in chunk.routers()],
                context,
                experts=bool(config.model.num_experts),
            ),
            Fp8State(scalings, context.groups["stage"]),
        ),
        distillation,
    )
    if config.guards.rerun_on_fault:
        engine.witness(sharding)
    return engine


def check_device(config: Config, device: torch.device) -> None:
    """Refuse settings that do not work on the device, which is known only now.

    Raises:
        ConfigError: names all of them.
    """
    problems = []
    if device.type != "cuda":
        wanted = {"cuda_graph": config.acceleration.cuda_graph, "tf32": config.precision.tf32}
        wanted["record_memory_history"] = config.profiling.record_memory_history
        problems += [
            f"`{name}` must be off on a CPU, but is on; leave it out" for name in wanted if wanted[name]
        ]
    elif config.guards.rerun_on_fault and not config.training.deterministic_mode:
        problems.append(
            "`deterministic_mode` must be on with `rerun_on_fault` on CUDA, but is off: the backward of "
            "attention adds in any order there, and a sound machine would be blamed; add "
            "`--deterministic-mode`"
        )
    if problems:
        raise ConfigError(problems)


def build_model(
    vocabulary: Vocabulary,
    context: ParallelContext,
    config: Config,
    training_plan: TrainingPlan,
    objective: LossChange | None = None,
) -> Engine:
    """Build this rank's chunks of the configured model, its teacher's if it has one, and their engine."""
    chunks = build_chunks(config, vocabulary, context)
    kd = config.distillation.kd
    teacher = load_teacher(config, training_plan, vocabulary, context) if kd else None
    return build_engine(config, training_plan, chunks, context, teacher, objective)
