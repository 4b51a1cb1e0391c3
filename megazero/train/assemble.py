"""Puts all parts together: from a configuration to a run. No other file knows all of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import TYPE_CHECKING

from megazero.checkpoint import Disk
from megazero.config.derive import replicas_per_node
from megazero.config.difficulties import Difficulties
from megazero.config.training_plan import TrainingPlan
from megazero.config.tree import Config
from megazero.data import BatchSampler, SampleDataset, SamplerKind, SamplerSpec
from megazero.data_efficiency.curriculum import curriculum_sampler
from megazero.errors import ConfigError
from megazero.layers import CudaGraphs, Fp8State, compile_layers, graph_layers, initialize_parameters, use_fp8
from megazero.models import MicroBatch
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
from megazero.train.guards.agreement import samples_of, settings_and_code, tokenizer_and_place
from megazero.train.loop import Loop
from megazero.train.observe.host import host_remarks, measure_matmul_rate, ranks_here
from megazero.train.observe.monitors import build_monitors
from megazero.train.parts.chunks import DTYPES, Chunks, build_chunks, evaluation_program, train_program
from megazero.train.parts.families import TokenFlops, family_of
from megazero.train.parts.vocabulary import Vocabulary, build_vocabulary
from megazero.train.process import compute_deterministically, keep_freed_memory
from megazero.train.resume.fit import compare_data, data_record
from megazero.train.resume.resume import resume
from megazero.train.resume.snapshot import Snapshots
from megazero.train.resume.teacher import load_teacher
from megazero.train.resume.weights import take_foreign_weights
from megazero.train.run_plan import RunPlan
from megazero.train.step.distillation import Distillation, Teacher
from megazero.train.step.engine import Engine, Programs, Schedules
from megazero.train.step.feed import Feed, Feeds, make_feed
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
    offloaded_bytes,
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
        RouterLoads([r for chunk in chunks.values() for r in chunk.routers()], config.model, context),
        context,
        distillation,
        Fp8State(scalings, context.groups["stage"]),
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


def build_feeds(
    config: Config,
    training_plan: TrainingPlan,
    vocabulary: Vocabulary,
    context: ParallelContext,
    stream_seed: int,
) -> Feeds:
    """The feeds of the three splits, with as many samples as the training will take (this fixes their order).

    Raises:
        DataError: files are missing or damaged, or hold too little data for one sample.
    """
    family, data, training, end = family_of(config.model), config.data, config.training, training_plan.end
    sizes = (
        # All that were asked for, as a continuation with another batch size may leave fewer over at the end.
        0 if training.skip_train else training.train_samples or end.samples,
        training_plan.evaluations.samples_until(end.iteration),
        training_plan.evaluations.samples,
    )
    train, valid, test = family.datasets(config, vocabulary, sizes)

    def feed(
        dataset: SampleDataset | None, ahead: int = 0, seed: int | None = None
    ) -> Feed[MicroBatch] | None:
        if dataset is None:
            return None
        spec = SamplerSpec(
            num_samples=len(dataset),
            micro_batch_size=config.batch.micro_batch_size,
            data_parallel_rank=context.data.rank,
            data_parallel_size=context.data.size,
            kind=SamplerKind(data.dataloader_type),
            seed=training.seed,
            data_sharding=data.data_sharding,
        )
        sampler = curriculum_sampler(config, training_plan.steps, dataset, spec) if dataset is train else None
        collate = family.collate(config, vocabulary.size, context.device, seed)
        return make_feed(dataset, sampler or BatchSampler(spec), collate, ahead)

    return Feeds(feed(train, data.num_workers, stream_seed), feed(valid), feed(test))


def build_plan(
    config: Config, training_plan: TrainingPlan, vocabulary: Vocabulary, context: ParallelContext
) -> RunPlan:
    """The plan of the run: everything that the loop will do."""
    training, logging = config.training, config.logging
    minutes = training.exit_duration_in_mins
    return RunPlan(
        training_plan=training_plan,
        flops_per_token=TokenFlops(config, vocabulary),
        matmul_rate=measure_matmul_rate(DTYPES[config.precision.dtype], context.device),
        save_interval=config.checkpoint.save_interval,
        exit_interval=training.exit_interval,
        exit_seconds=None if minutes is None else minutes * 60,
        guards=config.guards,
        stability=logging.log_stability,
        log_params_norm=logging.log_params_norm,
        log_num_zeros=logging.log_num_zeros_in_grad,
        exact_timers=logging.log_timers_to_tensorboard,
        log_interval=logging.log_interval,
        straggler_interval=logging.straggler_interval or None,
        measures_memory=logging.metrics_jsonl is not None,
        difficulties=Difficulties.of(config.data_sampling),
    )


def pretrain(config: Config, launch: Launch | None = None, disk: Disk | None = None) -> TrainState:
    """Run a training as configured, on this rank of the job.

    Args:
        config: the run's configuration.
        launch: this rank's place in the job; by default, as given by the launcher.
        disk: writes the checkpoints.

    Raises:
        MegazeroError: something that the user has to fix prevents the run.
    """
    if config.finetune.task is not None:
        raise ConfigError(
            f"`task` must be left out of pretraining, but is {config.finetune.task}; run finetune.py"
        )
    return in_job(config, launch, lambda joined: pretrain_on(config, joined, disk))


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


def pretrain_on(config: Config, joined: ParallelContext, disk: Disk | None = None) -> TrainState:
    """`pretrain` on a rank that has joined its job, such as one of a world of threads.

    Args:
        config, disk: as for `pretrain`.
        joined: the rank's place and its groups.

    Raises:
        MegazeroError: as `pretrain`.
    """
    traffic, others = TrafficLog(), others_running(own=ranks_here())
    context = count_traffic(joined, traffic) if config.logging.comms_logger else joined
    vocabulary = build_vocabulary(config)

    build = partial(build_model, vocabulary, context)
    begin = partial(take_foreign_weights, config, context, vocabulary.size)
    resumed = resume(config, context, vocabulary.size, build, begin)
    config, training_plan, engine, state = (
        resumed.config,
        resumed.training_plan,
        resumed.engine,
        resumed.state,
    )
    feeds = build_feeds(config, training_plan, vocabulary, context, resumed.stream_seed)
    datasets = [None if feed is None else feed.dataset for feed in (feeds.train, feeds.valid, feeds.test)]
    agree(
        joined.world,
        lambda: {**tokenizer_and_place(config, vocabulary, state), **samples_of(datasets)},
        context.device,
    )
    trained = data_record(datasets[0], context)
    compared = compare_data(resumed.data, trained, changes_pass=not config.data.verify_data)
    plan = build_plan(config, training_plan, vocabulary, context)
    monitor = build_monitors(config, context.rank == 0, state.iteration, training_plan.end.iteration)
    notes = dict.fromkeys(note for dataset in datasets if dataset is not None for note in dataset.notes)
    offloaded = [
        f"offload: each rank keeps {size / 2**20:,.1f} MiB of its state in {tier}"
        for tier, size in offloaded_bytes(engine.optimizer.store).items()
    ]
    host = host_remarks(DTYPES[config.precision.dtype], plan.matmul_rate, context.device, others)
    for remark in (*host, *resumed.remarks, *compared, *engine.distillation.remarks, *notes, *offloaded):
        monitor.message(remark)
    snapshots = None
    try:
        if config.checkpoint.save and not config.training.skip_train:
            snapshots = Snapshots(
                config, training_plan, engine, context, vocabulary.size, resumed.stream_seed, disk
            )
            snapshots.note({"data": [record.model_dump() for record in trained or ()]})
        loop = Loop(engine, plan, feeds, monitor, snapshots, context)
        if config.training.skip_train:
            for split in ("validation", "test"):
                if (feeds.valid if split == "validation" else feeds.test) is not None:
                    loop.evaluate(split, state)
        else:
            state = loop.fit(state)
        for line in traffic.table():
            monitor.message(f"communication of rank 0 | {line}")
    finally:
        if snapshots is not None:
            snapshots.saver.close()
        monitor.close()
        if feeds.train is not None:
            feeds.train.close()
    return state
