"""Fine-tuning: from a configuration to a trained and evaluated classifier."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from megazero.checkpoint import Disk
from megazero.config.tree import Config
from megazero.data import BatchSampler, EpochOrder, SamplerSpec
from megazero.errors import CheckpointError, ConfigError, DataError
from megazero.models import LabelledBatch
from megazero.mpu import Launch, ParallelContext, TrafficLog, agree, count_traffic, gather_values
from megazero.train.assemble import build_model, build_plan, in_job
from megazero.train.finetuning.best import BestModel
from megazero.train.finetuning.evaluation import EvaluationData, TaskLoop
from megazero.train.finetuning.predictions import check_writable, write_predictions
from megazero.train.finetuning.pretrained import take_pretrained
from megazero.train.finetuning.task import LabelledSplit, TaskData, completed, read_task
from megazero.train.guards.agreement import labelled_samples, tokenizer_and_place
from megazero.train.observe.monitors import Monitor, build_monitors
from megazero.train.parts.families import classifiers_of
from megazero.train.parts.vocabulary import Vocabulary, build_vocabulary
from megazero.train.resume.resume import Resumed, resume
from megazero.train.resume.snapshot import Snapshots
from megazero.train.step.feed import Feed, Feeds, make_feed
from megazero.train.step.state import TrainState


def finetune(config: Config, launch: Launch | None = None, disk: Disk | None = None) -> TrainState:
    """Fine-tune as configured, on this rank of the job.

    Args:
        config: the run's configuration, with a task.
        launch: this rank's place in the job; by default, as given by the launcher.
        disk: writes the checkpoints.

    Raises:
        MegazeroError: something that the user has to fix prevents the run.
    """
    if config.finetune.task is None:
        raise ConfigError("`task` must be set for fine-tuning, but is not; add --task")
    return in_job(config, launch, lambda joined: finetune_on(config, joined, disk))


def finetune_on(config: Config, joined: ParallelContext, disk: Disk | None = None) -> TrainState:
    """`finetune` on a rank that has joined its job, such as one of a world of threads.

    Args:
        config, disk: as for `finetune`.
        joined: the rank's place and its groups.

    Raises:
        MegazeroError: as `finetune`.
    """
    traffic = TrafficLog()
    context = count_traffic(joined, traffic) if config.logging.comms_logger else joined
    vocabulary = build_vocabulary(config)
    data = read_task(config, vocabulary)
    config = completed(config, data, context)
    if config.finetune.predictions:
        _on_first(context, partial(check_writable, config.finetune.predictions))
    build = partial(build_model, vocabulary, context)
    begin = partial(take_pretrained, config, context, vocabulary.size)
    resumed = resume(config, context, vocabulary.size, build, begin)
    agree(
        joined.world,
        lambda: {**tokenizer_and_place(config, vocabulary, resumed.state), **labelled_samples(config)},
        context.device,
    )
    if data.train is not None:
        _check_epochs(resumed, config)
    monitor = build_monitors(
        config, context.rank == 0, resumed.state.iteration, resumed.training_plan.end.iteration
    )
    for remark in (*data.remarks, *resumed.remarks):
        monitor.message(remark)
    state = _examined(resumed, data, vocabulary, monitor, disk)
    for line in traffic.table():
        monitor.message(f"communication of rank 0 | {line}")
    return state


def _examined(
    resumed: Resumed, data: TaskData, vocabulary: Vocabulary, monitor: Monitor, disk: Disk | None
) -> TrainState:
    """Train from where the run stands, then evaluate the model."""
    config, training_plan, engine, state = (
        resumed.config,
        resumed.training_plan,
        resumed.engine,
        resumed.state,
    )
    context, trains = engine.context, data.train is not None
    feed = partial(_feed, config, vocabulary, context)
    train = feed(data.train, resumed.stream_seed)
    snapshots = best = None
    try:
        if config.checkpoint.save and trains:
            sizes = (vocabulary.size, resumed.stream_seed)
            snapshots = Snapshots(config, training_plan, engine, context, *sizes, disk)
            if data.valid is not None:
                best = BestModel.of(config, training_plan, engine, sizes, state.iteration, disk)
        inputs = EvaluationData(data, len(data.labels), feed(data.valid, None), feed(data.test, None), best)
        plan = build_plan(config, training_plan, vocabulary, context)
        loop = TaskLoop(engine, plan, Feeds(train, inputs.valid, None), monitor, snapshots, context, inputs)
        if trains:
            state = loop.fit(state)
            if state.iteration < training_plan.end.iteration:
                return state  # stopped early; the next run goes on
        elif data.valid is not None:
            loop.evaluate("validation", state)
        _conclude(loop, config, state)
    finally:
        for resource in (snapshots.saver if snapshots else None, best, monitor, train):
            if resource is not None:
                resource.close()
    return state


def _conclude(loop: TaskLoop, config: Config, state: TrainState) -> None:
    """Evaluate the test files with the best model, and write the predictions."""
    inputs, path = loop.inputs, config.finetune.predictions
    if inputs.test is None and path is None:
        return
    mark = None if inputs.best is None else inputs.best.mark
    if inputs.best is not None and mark is not None and mark.iteration != state.iteration:
        inputs.best.take()
        loop.monitor.message(
            f"the best model is that of iteration {mark.iteration}, with accuracy {mark.accuracy:.4f}"
        )
    split = "validation" if inputs.test is None else "test"
    answers = loop.answers(split) if inputs.test is None else loop.examine(split, state)
    labelled = inputs.data.valid if inputs.test is None else inputs.data.test
    if path is not None and labelled is not None:
        _on_first(
            loop.context,
            partial(write_predictions, path, labelled.files, inputs.data.labels, answers.scores),
        )
        loop.monitor.message(f"wrote the predictions for {len(labelled)} samples to {path}")


def _feed(
    config: Config,
    vocabulary: Vocabulary,
    context: ParallelContext,
    split: LabelledSplit | None,
    stream_seed: int | None,
) -> Feed[LabelledBatch] | None:
    """The samples of a split.

    With a stream seed, these are all epochs, each in an order of its own; without, one in the files' order.
    """
    if split is None:
        return None
    batch, trains, classes = config.batch, stream_seed is not None, config.model.num_classes
    assert batch.global_batch_size is not None, "`completed` sets it"
    assert classes is not None, "`completed` sets them"
    order = EpochOrder(
        split.samples,
        batch.global_batch_size,
        config.finetune.epochs if trains else 1,
        config.training.seed if trains else None,
    )
    spec = SamplerSpec(
        num_samples=len(order),
        micro_batch_size=batch.micro_batch_size,
        data_parallel_rank=context.data.rank,
        data_parallel_size=context.data.size,
    )
    collate = classifiers_of(config.model.family, classes).collate(
        config, vocabulary.size, context.device, stream_seed
    )
    return make_feed(order, BatchSampler(spec), collate, config.data.num_workers if trains else 0)


def _check_epochs(resumed: Resumed, config: Config) -> None:
    """Refuse a run whose earlier steps had another size: its iteration would not be a place in an epoch."""
    state, batch = resumed.state, config.batch.global_batch_size
    assert batch is not None, "`completed` sets it"
    if state.consumed_samples != state.iteration * batch:
        raise CheckpointError(
            f"`global_batch_size` must stay {state.consumed_samples / state.iteration:g} until the last "
            f"epoch, but is {batch}; set it, or begin anew in another folder"
        )


def _on_first(context: ParallelContext, work: Callable[[], None]) -> None:
    """Do `work` on the first rank; a DataError is raised on all."""
    problem = None
    if context.rank == 0:
        try:
            work()
        except DataError as error:
            problem = str(error)
    problem = gather_values(context.world, problem, context.device)[0]
    if problem is not None:
        raise DataError(problem)
