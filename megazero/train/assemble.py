"""Puts all parts together: from a configuration to a run. No other file knows all of them.

A run has a task, pretraining or fine-tuning: the part in which runs differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Protocol

from megazero.checkpoint import Disk
from megazero.config.derive import replicas_per_node
from megazero.config.training_plan import TrainingPlan
from megazero.config.tree import Config
from megazero.errors import ConfigError
from megazero.layers import CudaGraphs, Fp8State, compile_layers, graph_layers, initialize_parameters, use_fp8
from megazero.moe import RouterLoads
from megazero.mpu import (
    Launch,
    ParallelContext,
    TrafficLog,
    agree,
    count_traffic,
    join,
    leave,
    reporting,
)
from megazero.mpu.cores import others_running
from megazero.optim import (
    build_learning_rate,
    build_loss_scaler,
    build_update_rule,
    build_weight_decay,
)
from megazero.pipeline import Executor
from megazero.train.guards.agreement import settings_and_code, tokenizer_and_place
from megazero.train.loop import Loop
from megazero.train.observe.evaluation import Evaluations
from megazero.train.observe.host import measure_matmul_rate, ranks_here
from megazero.train.observe.meters import Meters
from megazero.train.observe.monitors import Monitor, build_monitors
from megazero.train.parts.chunks import DTYPES, Chunks, build_chunks, evaluation_program, train_program
from megazero.train.parts.families import TokenFlops
from megazero.train.parts.vocabulary import Vocabulary, build_vocabulary
from megazero.train.process import compute_deterministically, keep_freed_memory
from megazero.train.resume.resume import Resumed, resume
from megazero.train.resume.snapshot import Snapshots
from megazero.train.resume.teacher import load_teacher
from megazero.train.step.distillation import Distillation, Teacher
from megazero.train.step.engine import Engine, LayerMemory, Programs, Schedules
from megazero.train.step.feed import Feeds
from megazero.train.step.skipping import SkippingPlan
from megazero.train.step.state import TrainState
from megazero.zero import (
    DataParallel,
    DelayedUpdates,
    OffloadStore,
    Optimizer,
    Unit,
    ZeroPolicy,
    build_store,
    store_kind,
)

if TYPE_CHECKING:
    from megazero.pipeline.sharding import Sharding

    _: type[Sharding] = DataParallel


def build_engine(
    config: Config,
    training_plan: TrainingPlan,
    chunks: Chunks,
    context: ParallelContext,
    teacher: Teacher | None = None,
) -> Engine:
    """This rank's parts of the model with their optimizer, loss scale and schedules.

    Parameters on the meta device get memory and the seed's weights here, unit by unit.
    """
    distillation = Distillation.of(config.distillation, chunks, teacher)
    blocks = [block for chunk in chunks.values() for block in chunk.blocks()]
    scalings = use_fp8(blocks, config.precision, config.model.num_layers, context.device)
    if config.acceleration.compile:
        compile_layers(blocks, config.acceleration.compile_backend)
    if config.acceleration.cuda_graph:
        if context.device.type != "cuda":
            raise ConfigError("`cuda_graph` must be off on a CPU, but is on; leave `--cuda-graph` out")
        graph_layers(blocks, CudaGraphs())
    rule = build_update_rule(config.optimizer)
    policy = ZeroPolicy.of(config.zero, config.offload, rule.needs, config.training.seed)
    units = [
        Unit(number, block, tuple(block.parameters()))
        for number, chunk in chunks.items()
        for block in chunk.blocks()
    ]
    fill = partial(initialize_parameters, seed=config.training.seed, place=context.place)
    store = build_store(units, policy, context, fill, kind=store_kind(config.offload, context.device))
    delayed = None
    if config.offload.delayed_param_update:
        assert isinstance(store, OffloadStore), "rules ask for offloaded state"
        delayed = DelayedUpdates(store, config.offload.delayed_param_update_start)
    sharding = DataParallel(units, store, policy, context)
    executor = Executor(distillation.beside(chunks), context.pp, sharding, context.device)
    engine = Engine(
        executor,
        Programs(cache(partial(train_program, config)), cache(partial(evaluation_program, config))),
        Optimizer(store, rule, context, config.optimizer.clip_grad, delayed),
        build_loss_scaler(config.precision),
        Schedules(
            build_learning_rate(config.optimizer, training_plan),
            build_weight_decay(config.optimizer, training_plan),
            SkippingPlan.of(config, training_plan),
        ),
        LayerMemory(
            RouterLoads([r for chunk in chunks.values() for r in chunk.routers()], config.model, context),
            Fp8State(scalings, context.groups["stage"]),
        ),
        distillation,
    )
    if config.guards.rerun_on_fault:
        engine.witness(sharding)
    return engine


def build_model(
    vocabulary: Vocabulary, context: ParallelContext, config: Config, training_plan: TrainingPlan
) -> Engine:
    """`build_engine` of this rank's chunks of the configured model, and of its teacher's if it has one."""
    chunks = build_chunks(config, vocabulary, context)
    teacher = load_teacher(config, training_plan, vocabulary, context)
    return build_engine(config, training_plan, chunks, context, teacher)


def in_job(
    config: Config, launch: Launch | None, work: Callable[[ParallelContext], TrainState]
) -> TrainState:
    """Do `work` as a rank of the job: join it, report what goes wrong to the others, leave it."""
    keep_freed_memory()
    if config.training.deterministic_mode:
        compute_deterministically()
    place, nodes = launch or Launch.from_environment(), replicas_per_node(config.zero)
    facts = partial(settings_and_code, config, place.speaks_for_node)
    joined = join(config.parallel, place, nodes, facts)
    with reporting(joined):
        state = work(joined)
    leave(joined)
    return state


class Task(Protocol):
    """The part in which pretraining and fine-tuning differ. Every rank calls all of its methods."""

    def completed(self, config: Config, vocabulary: Vocabulary, context: ParallelContext) -> Config:
        """The configuration, with what follows from the task's files."""
        return config

    def begin(
        self, config: Config, context: ParallelContext, vocab_size: int, engine: Engine
    ) -> tuple[str, ...]:
        """Give a new engine the weights that training begins with, and say so."""

    def feeds(self, resumed: Resumed, vocabulary: Vocabulary, context: ParallelContext) -> Feeds:
        """The samples of each split that training and its evaluations read."""

    def samples(self, config: Config, feeds: Feeds) -> Mapping[str, str]:
        """The facts about samples that all ranks must agree on."""

    def check(self, resumed: Resumed, feeds: Feeds) -> None:
        """Refuse samples with which the training would not be continued.

        Raises:
            MegazeroError: on every rank.
        """

    def remarks(self, run: Run) -> Iterable[str]:
        """Lines for a person before the first step."""

    def facts(self) -> Mapping[str, object]:
        """Further facts for all checkpoints, as JSON."""
        return {}

    def evaluations(self, run: Run, disk: Disk | None) -> Evaluations:
        """When to evaluate, and how."""

    def conclude(self, run: Run, state: TrainState) -> None:
        """Do what is left to do once the training is complete."""

    def close(self) -> None:
        """Release what the task has opened."""


@dataclass
class Run:
    """A run on this rank of the job, with all its parts.

    Attributes:
        resumed: its configuration, plan, engine and state at the beginning.
        feeds: its samples.
        meters: measure its steps.
        monitor: receives all metrics and messages.
        traffic: counts its communication, if that is asked for.
        others: tasks of other programs on this machine as it began; None if unknown.
        snapshots: saves it; None if nothing is to be saved.
    """

    resumed: Resumed
    feeds: Feeds
    meters: Meters
    monitor: Monitor
    traffic: TrafficLog
    others: int | None
    snapshots: Snapshots | None = None


def assemble(config: Config, joined: ParallelContext, task: Task, disk: Disk | None = None) -> Run:
    """Put a run together: resume it or begin it, and make sure that all ranks agree on its samples.

    Raises:
        MegazeroError: something that the user has to fix prevents the run.
    """
    traffic, others = TrafficLog(), others_running(own=ranks_here())
    context = count_traffic(joined, traffic) if config.logging.comms_logger else joined
    vocabulary = build_vocabulary(config)
    config = task.completed(config, vocabulary, context)
    build = partial(build_model, vocabulary, context)
    begin = partial(task.begin, config, context, vocabulary.size)
    resumed = resume(config, context, vocabulary.size, build, begin)
    config, engine, plan, state = resumed.config, resumed.engine, resumed.training_plan, resumed.state
    feeds = task.feeds(resumed, vocabulary, context)
    agree(
        joined.world,  # which is not counted
        lambda: {**tokenizer_and_place(config, vocabulary, state), **task.samples(config, feeds)},
        context.device,
    )
    task.check(resumed, feeds)
    rate = measure_matmul_rate(DTYPES[config.precision.dtype], context.device)
    monitor = build_monitors(config, context.rank == 0, state.iteration, plan.end.iteration)
    meters = Meters(config, plan, engine, TokenFlops(config, vocabulary), rate, monitor.message)
    run = Run(resumed, feeds, meters, monitor, traffic, others)
    for remark in task.remarks(run):
        monitor.message(remark)
    try:
        if config.checkpoint.save and not config.training.skip_train:
            seed = resumed.stream_seed
            run.snapshots = Snapshots(config, plan, engine, context, vocabulary.size, seed, disk)
            run.snapshots.note(task.facts())
    except BaseException:
        close(run, task)
        raise
    return run


def carry_out(config: Config, joined: ParallelContext, task: Task, disk: Disk | None = None) -> TrainState:
    """Assemble a run and carry it out, on a rank that has joined its job."""
    run = assemble(config, joined, task, disk)
    config, state, end = run.resumed.config, run.resumed.state, run.resumed.training_plan.end
    try:
        evaluations = task.evaluations(run, disk)
        if config.training.skip_train:
            evaluations.at_the_end(state)
        else:
            state = Loop(run.meters, run.feeds, run.monitor, run.snapshots, evaluations).fit(state)
        if config.training.skip_train or state.iteration >= end.iteration:  # else the next run goes on
            task.conclude(run, state)
        for line in run.traffic.table():
            run.monitor.message(f"communication of rank 0 | {line}")
    finally:
        close(run, task)
    return state


def close(run: Run, task: Task) -> None:
    """Release everything that a run has opened."""
    if run.snapshots is not None:
        run.snapshots.saver.close()
    task.close()
    run.monitor.close()
    if run.feeds.train is not None:
        run.feeds.train.close()
