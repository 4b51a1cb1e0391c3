"""Tasks of lm-evaluation-harness at intervals of a training, on its live model and on any layout.

The first rank runs the harness; all ranks compute. Nothing of the training is changed: no random generator
is seeded, and the weights are those in use, gathered where they are sharded.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
import yaml

from megazero.config.derive import PipelineShape
from megazero.config.tree.recompute import RecomputeConfig
from megazero.errors import ConfigError
from megazero.harness.answers import Answers, Leading, follow
from megazero.harness.scoring import Scorer
from megazero.harness.text import HarnessTokenizer
from megazero.inference.staged import StagedModel
from megazero.layers.placement import Placement
from megazero.loss import LossTerm
from megazero.models.batch import Batch
from megazero.models.language_model import LanguageModel
from megazero.mpu.context import ParallelContext, with_whole_sequences
from megazero.mpu.messages import broadcast_value
from megazero.regular_file import read_regular_text
from megazero.train.assemble import Run
from megazero.train.observe.evaluation import PeriodicEvaluation
from megazero.train.observe.metrics import EvalMetrics
from megazero.train.parts.chunks import schedule_of
from megazero.train.parts.vocabulary import build_vocabulary
from megazero.train.step.concern import StepContext, Verdict
from megazero.train.step.losses import Losses
from megazero.train.step.state import TrainState
from megazero.zero.parallel import DataParallel


@dataclass(frozen=True)
class TaskList:
    """The tasks in a file: a list of names, or `tasks` and `include_path`, a folder with more tasks."""

    names: tuple[str, ...]
    include_path: str | None = None

    @classmethod
    def read(cls, path: str) -> TaskList:
        """Read a YAML or JSON file. Raises ConfigError, in a sentence, if it is not such a file."""
        try:
            content = yaml.safe_load(read_regular_text(path))
        except (OSError, ValueError, yaml.YAMLError) as error:
            why = " ".join(str(error).split())
            raise ConfigError(
                f"`--eval-tasks` must be a YAML or JSON file, but {path} is not: {why}"
            ) from error
        content = {"tasks": content} if isinstance(content, list) else content
        names = content.get("tasks") if isinstance(content, dict) else None
        if (
            not names
            or not all(isinstance(name, str) for name in names)
            or content.keys() - {"tasks", "include_path"}
        ):
            raise ConfigError(
                f"`--eval-tasks` must hold a list of tasks, or `tasks` and `include_path`, but {path} holds "
                f"{str(content)[:80]!r}; write names of tasks"
            )
        folder = content.get("include_path")
        return cls(tuple(names), None if folder is None else str(Path(path).parent / folder))

    def manager(self) -> Any:
        """The harness's manager of tasks. Raises ConfigError without lm_eval, or if a name is unknown."""
        try:
            from lm_eval.tasks import TaskManager
        except ImportError as error:
            raise ConfigError(
                "lm_eval must be installed for `--eval-tasks`, but is not; pip install 'megazero[harness]'"
            ) from error
        manager = TaskManager(include_path=self.include_path, include_defaults=False)
        if set(self.names) - set(manager.all_tasks):
            manager = TaskManager(include_path=self.include_path)
        if unknown := [name for name in self.names if name not in manager.all_tasks]:
            raise ConfigError(
                f"`--eval-tasks` must name tasks of the harness, but it has no {unknown[0]}; `megazero "
                "lm-eval ls tasks` lists them"
            )
        return manager


@dataclass(frozen=True)
class TaskMetrics(EvalMetrics):
    """The metrics of one evaluation of tasks."""

    predicts_text: ClassVar[bool] = False
    what: ClassVar[str] = "metrics"


class TaskEvaluations(PeriodicEvaluation):
    """The evaluations of a training, and those of tasks besides.

    Args:
        run: the run.
        losses: its other evaluations.

    Raises:
        ConfigError: on every rank: the file of tasks or a name in it is wrong, or there is no tokenizer.
    """

    def __init__(self, run: Run, losses: PeriodicEvaluation):
        super().__init__(losses.evaluate, losses.interval, losses.splits)
        training = run.resumed.config.training
        self.run, self.every, self.limit = run, training.eval_tasks_interval, training.eval_tasks_limit
        assert training.eval_tasks is not None, "a run without tasks has no such evaluations"
        self._context, self._last = run.resumed.engine.context, -1
        tokenizer = build_vocabulary(run.resumed.config).tokenizer
        if tokenizer is None:
            raise ConfigError("`tokenizer_type` must be known for `--eval-tasks`, but is not; set it")
        self._tokenizer = HarnessTokenizer(tokenizer)
        self.tasks, self._manager = TaskList.read(training.eval_tasks), None
        problem = ""
        if self._context.rank == 0:
            try:
                self._manager = self.tasks.manager()
            except ConfigError as error:
                problem = str(error)
        if problem := broadcast_value(self._context.world, problem, self._context.device):
            raise ConfigError(problem)

    def stands_at(self, state: TrainState) -> None:
        super().stands_at(state)
        self._last = state.iteration

    def after(self, now: StepContext) -> Verdict:
        verdict = super().after(now)
        if now.due(self.every):
            self._evaluate_tasks(now.state)
        return verdict

    def at_the_end(self, state: TrainState) -> None:
        super().at_the_end(state)
        if self._last < state.iteration:
            self._evaluate_tasks(state)

    def _evaluate_tasks(self, state: TrainState) -> None:
        self._last, began = state.iteration, time.perf_counter()
        metrics: dict[str, float] = {}
        with self.run.meters.timers("evaluation"), self._live_model() as model:
            answers = Answers(Scorer(model, self._context), self._tokenizer)
            if self._context.rank == 0:
                leading = Leading(answers)
                try:
                    for name in self.tasks.names:
                        metrics |= self._metrics(leading, name, state.iteration)
                finally:
                    leading.close()
            else:
                follow(answers)
        metrics = broadcast_value(self._context.world, metrics, self._context.device)
        if self.run.snapshots is not None:
            self.run.snapshots.note({"eval_tasks": {"iteration": state.iteration, "metrics": metrics}})
        if metrics:
            terms = tuple(LossTerm(name, coefficient=0.0) for name in metrics)
            losses, seconds = Losses(terms, tuple(metrics.values())), time.perf_counter() - began
            self.run.monitor.evaluation(TaskMetrics(state.progress, "tasks", losses, 0, seconds))

    def _metrics(self, leading: Leading, name: str, iteration: int) -> dict[str, float]:
        """The metrics of a task; none, and a warning, if it fails."""
        from lm_eval import simple_evaluate

        from megazero.harness.lm import HarnessModel

        try:
            results = simple_evaluate(
                model=HarnessModel(leading),
                tasks=[name],
                task_manager=self._manager,
                limit=self.limit,
                bootstrap_iters=0,
                log_samples=False,
                # A training's own generators stay as they are.
                random_seed=None,
                numpy_random_seed=None,
                torch_random_seed=None,
            )
        except Exception as error:  # a task is a program of the user's
            why = " ".join(str(error).split())[:300] or type(error).__name__
            self.run.monitor.message(f"warning: the task {name} failed at iteration {iteration}: {why}")
            return {}
        return _numbers(results["results"] if results else {})

    @contextmanager
    def _live_model(self) -> Iterator[StagedModel[Batch]]:
        """The weights in use as a model for inference: whole, and with whole sequences on every rank."""
        engine, config = self.run.resumed.engine, self.run.resumed.config
        context = with_whole_sequences(self._context)
        sharding = engine.executor.sharding
        assert isinstance(sharding, DataParallel), "an engine's sharding is what its units need"
        with sharding.gathered(), torch.no_grad():
            students = {n: getattr(c, "student", c) for n, c in engine.executor.chunks.items()}
            chunks = {number: _twin(chunk, context) for number, chunk in students.items()}
            stage_of = schedule_of(PipelineShape.of(config)).stage_of
            yield StagedModel(chunks, stage_of, self._context.pp)


def _twin(chunk: Any, context: ParallelContext) -> LanguageModel:
    """A chunk with the same weights for inference, where no rank shares a sequence with another."""
    own = chunk.placement
    placement = Placement.of(context, own.dtype, token_dispatcher=own.token_dispatcher)
    held = replace(chunk.held, placement=replace(placement, device=torch.device("meta")), tied={})
    twin = LanguageModel.of(type(chunk)(replace(held, recompute=RecomputeConfig())))
    twin.placement = placement
    twin.load_state_dict(chunk.state_dict(), assign=True)
    for mine, its in zip(chunk.routers(), twin.routers(), strict=True):
        its.bias, its.load = mine.bias, mine.load
    return twin


def _numbers(results: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Name, such as ``arc_easy_acc_norm`` -> value, of the metrics of all tasks."""
    numbers = {}
    for task, values in results.items():
        for key, value in values.items():
            metric, _, kind = key.partition(",")
            if isinstance(value, (int, float)) and kind and not metric.endswith("_stderr"):
                name = f"{task}_{metric}" if kind == "none" else f"{task}_{metric}_{kind}"
                numbers["".join(c if c.isidentifier() or c.isdigit() else "_" for c in name)] = float(value)
    return numbers
