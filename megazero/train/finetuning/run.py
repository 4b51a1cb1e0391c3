"""Fine-tuning: from a configuration to a trained and evaluated classifier."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial

from megazero.checkpoint.disk import Disk
from megazero.config.tree.config import Config
from megazero.errors import ConfigError, DataError
from megazero.models.classifier_batch import LabelledBatch
from megazero.mpu.context import ParallelContext
from megazero.mpu.launch import Launch
from megazero.mpu.messages import broadcast_value
from megazero.train.assemble import Run, TrainingTask, assemble
from megazero.train.finetuning.best import BestModel
from megazero.train.finetuning.epochs import check_batch, feed_of
from megazero.train.finetuning.evaluation import TaskEvaluation
from megazero.train.finetuning.predictions import check_writable, write_predictions
from megazero.train.finetuning.pretrained import take_pretrained
from megazero.train.finetuning.task import LabelledSplit, TaskData, completed, read_task
from megazero.train.guards.agreement import labelled_samples
from megazero.train.observe.evaluation import PeriodicEvaluation
from megazero.train.parts.families import classifiers_of
from megazero.train.parts.vocabulary import Vocabulary, build_vocabulary
from megazero.train.process import in_job
from megazero.train.resume.resume import Resumed
from megazero.train.step.engine import Engine
from megazero.train.step.feed import Feed, Feeds
from megazero.train.step.state import TrainState


def finetune(config: Config, launch: Launch | None = None, disk: Disk | None = None) -> TrainState:
    """Fine-tune as configured, on this rank of the job.

    Args:
        launch: this rank's place in the job; by default, the launcher's environment says it.

    Raises:
        MegazeroError: something that the user has to fix prevents the run.
    """
    if config.finetune.task is None:
        raise ConfigError("`task` must be set for fine-tuning, but is not; add --task")
    return in_job(config, launch, lambda joined: finetune_on(config, joined, disk))


def finetune_on(config: Config, joined: ParallelContext, disk: Disk | None = None) -> TrainState:
    """Fine-tune on a rank that has joined its job, such as a thread of a test.

    Raises:
        MegazeroError: as `finetune`.
    """
    vocabulary = build_vocabulary(config)
    data = read_task(config, vocabulary)
    config = completed(config, data, joined)
    if config.finetune.predictions:
        _on_first(joined, partial(check_writable, config.finetune.predictions))
    task = FineTuning(data)
    return assemble(config, vocabulary, joined, task, disk).carry_out(task, disk)


class FineTuning(TrainingTask):
    """The task of fine-tuning."""

    _evaluate: TaskEvaluation

    def __init__(self, data: TaskData):
        self.data = data
        self.best: BestModel | None = None
        self._feeds: dict[str, Feed[LabelledBatch]] = {}

    def begin(
        self, config: Config, context: ParallelContext, vocab_size: int, engine: Engine
    ) -> tuple[str, ...]:
        return take_pretrained(config, context, vocab_size, engine)

    def feeds(self, resumed: Resumed, vocabulary: Vocabulary, context: ParallelContext) -> Feeds:
        feed = partial(_feed, resumed.config, vocabulary, context)
        splits = {"validation": feed(self.data.valid, None), "test": feed(self.data.test, None)}
        self._feeds = {split: there for split, there in splits.items() if there is not None}
        return Feeds(feed(self.data.train, resumed.stream_seed), splits["validation"], None)

    def samples(self, config: Config, feeds: Feeds) -> Mapping[str, str]:
        return labelled_samples(config)

    def check(self, resumed: Resumed, feeds: Feeds) -> None:
        """Refuse a new batch size."""
        if self.data.train is not None:
            check_batch(resumed)

    def remarks(self, run: Run) -> Iterable[str]:
        return *self.data.remarks, *run.resumed.remarks

    def evaluations(self, run: Run, disk: Disk | None) -> PeriodicEvaluation:
        resumed, samples = run.resumed, run.resumed.training_plan.evaluations
        if run.snapshots is not None and "validation" in self._feeds:
            self.best = BestModel.of(run.snapshots, resumed.state.iteration, disk)
        self._evaluate = TaskEvaluation(
            resumed.engine,
            self.data,
            self._feeds,
            samples.batch_size,
            self.best,
            run.monitor,
            run.meters.timers,
        )
        return PeriodicEvaluation(self._evaluate, samples.interval, self._feeds.keys() & {"validation"})

    def conclude(self, run: Run, state: TrainState) -> None:
        """Evaluate the test files with the best model, and write the predictions."""
        path, tests = run.resumed.config.finetune.predictions, "test" in self._feeds
        score = None if self.best is None else self.best.score
        if score is not None:
            run.monitor.message(f"the best model is that of iteration {score.iteration}: {score}")
        if not tests and path is None:
            return
        if self.best is not None and score is not None and score.iteration != state.iteration:
            self.best.take()
        answers = self._evaluate("test", state) if tests else self._evaluate.answers("validation")
        labelled = self.data.test if tests else self.data.valid
        if path is not None and labelled is not None:
            write = partial(write_predictions, path, labelled.files, self.data.labels, answers.scores)
            _on_first(run.resumed.engine.context, write)
            run.monitor.message(f"wrote the predictions for {len(labelled)} samples to {path}")

    def close(self) -> None:
        if self.best is not None:
            self.best.close()


def _feed(
    config: Config,
    vocabulary: Vocabulary,
    context: ParallelContext,
    split: LabelledSplit | None,
    stream_seed: int | None,
) -> Feed[LabelledBatch] | None:
    """Make the feed of a split: with a stream seed all epochs, shuffled, else one in the files' order."""
    if split is None:
        return None
    classes = config.model.num_classes
    assert classes is not None, "`completed` sets them"
    samples = classifiers_of(config.model.family, classes).samples
    collate = samples.collate(config, vocabulary.size, context, stream_seed)
    return feed_of(config, context, split.samples, collate, stream_seed)


def _on_first(context: ParallelContext, work: Callable[[], None]) -> None:
    """Do `work` on the first rank; raise its DataError on all."""
    problem = None
    if context.rank == 0:
        try:
            work()
        except DataError as error:
            problem = str(error)
    problem = broadcast_value(context.world, problem, context.device)
    if problem is not None:
        raise DataError(problem)
