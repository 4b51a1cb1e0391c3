"""A training by policy gradients: pretraining's loop, fed with the model's own answers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from megazero.checkpoint.disk import Disk
from megazero.config.tree.config import Config
from megazero.errors import ConfigError, NumericsError
from megazero.models.objective import Objective
from megazero.mpu.context import ParallelContext
from megazero.mpu.launch import Launch
from megazero.post_training.policy.cycle import Cycle, Judges, PolicyFeed
from megazero.post_training.policy.objective import APART, PolicyObjective
from megazero.post_training.policy.prompts import Prompts, read_prompts
from megazero.post_training.policy.reference import load_reference
from megazero.post_training.policy.reward_model import RewardModel
from megazero.post_training.policy.rewards import Rewards
from megazero.train.assemble import Run, TrainingTask, assemble
from megazero.train.observe.evaluation import PeriodicEvaluation
from megazero.train.parts.vocabulary import Vocabulary, build_vocabulary
from megazero.train.process import in_job
from megazero.train.resume.resume import Resumed
from megazero.train.resume.weights import take_foreign_weights
from megazero.train.step.concern import CONTINUE, StepContext, Verdict, fail
from megazero.train.step.engine import Engine, Outcome
from megazero.train.step.feed import Feeds
from megazero.train.step.state import TrainState


def train_policy(config: Config, launch: Launch | None = None, disk: Disk | None = None) -> TrainState:
    """Train by policy gradients as configured, on this rank of the job.

    Args:
        launch: this rank's place in the job; by default, the launcher's environment says it.

    Raises:
        MegazeroError: something that the user has to fix prevents the run.
    """
    if config.policy.policy_method is None:
        raise ConfigError("`policy_method` must be set for `megazero rl`, but is not; add --policy-method")
    return in_job(config, launch, lambda joined: policy_on(config, joined, disk))


def policy_on(config: Config, joined: ParallelContext, disk: Disk | None = None) -> TrainState:
    """Train by policy gradients on a rank that has joined its job, such as a thread of a test.

    Raises:
        MegazeroError: as `train_policy`.
    """
    vocabulary = build_vocabulary(config)
    if vocabulary.tokenizer is None:
        raise ConfigError("`tokenizer_type` must be set to read prompts, but is not; set --tokenizer-type")
    rewards = Rewards.of(config.policy.reward_functions, config.policy.reward_timeout)
    task = PolicyTraining(read_prompts(config, vocabulary.tokenizer), rewards)
    return assemble(config, vocabulary, joined, task, disk).carry_out(task, disk)


class PolicyTraining(TrainingTask):
    """The task of policy gradients."""

    cycle: Cycle

    def __init__(self, prompts: Prompts, rewards: Rewards):
        self.prompts, self.rewards = prompts, rewards

    def objective(self, config: Config) -> Objective:
        return PolicyObjective.of(config)

    def begin(
        self, config: Config, context: ParallelContext, vocab_size: int, engine: Engine
    ) -> tuple[str, ...]:
        return take_foreign_weights(config, context, vocab_size, engine)

    def feeds(self, resumed: Resumed, vocabulary: Vocabulary, context: ParallelContext) -> Feeds:
        config, reference, model = resumed.config, None, None
        if config.policy.kl_coef is not None:
            reference = load_reference(config, vocabulary, context)
        if config.policy.reward_model is not None:
            model = RewardModel.load(config, vocabulary, context)
        judges = Judges(self.rewards, model, reference)
        self.cycle = Cycle(config, resumed.engine, vocabulary, self.prompts, judges)
        return Feeds(PolicyFeed.of_cycle(self.cycle), None, None)

    def samples(self, config: Config, feeds: Feeds) -> Mapping[str, str]:
        return {"prompts": self.prompts.digest}

    def check(self, resumed: Resumed, feeds: Feeds) -> None:
        """Refuse other prompts than the checkpoint's, and take its rollout over."""
        self.cycle.resume({} if resumed.run is None else resumed.run.task)

    def remarks(self, run: Run) -> Iterable[str]:
        yield from run.resumed.remarks
        policy, copies = run.resumed.config.policy, self.cycle.copies
        yield (
            f"{policy.policy_method}: {len(self.prompts.prompts)} prompts, {policy.group_size} answers to "
            f"each, given by {copies} {'copy' if copies == 1 else 'copies'} of the model"
        )

    def facts(self) -> Mapping[str, object]:
        return {"task": self.cycle.facts()}

    def evaluations(self, run: Run, disk: Disk | None) -> PeriodicEvaluation:
        """Make the check of each step, `--check-rollout`."""
        self.cycle.say = run.monitor.message
        if run.snapshots is not None:
            self.cycle.note = run.snapshots.note
        return RolloutCheck(self.cycle, run)


class RolloutCheck(PeriodicEvaluation):
    """Checks that the first update on a rollout computes the log-probabilities that its tokens had."""

    def __init__(self, cycle: Cycle, run: Run):
        super().__init__(lambda split, state: None, None, ())
        self._cycle, self._monitor = cycle, run.monitor
        self._how = run.resumed.config.policy.check_rollout
        self._tolerance = PolicyObjective.of(run.resumed.config).tolerance

    def after(self, now: StepContext) -> Verdict:
        """End the run, or warn, where log-probabilities are apart."""
        if self._how == "off" or now.result.outcome is Outcome.PASSED_OVER:
            return CONTINUE
        apart = now.result.losses[APART]
        if not self._cycle.begins(now.step.before.samples) or not apart:
            return CONTINUE
        text = (
            f"`log-probabilities` of the rollout must be those of training to {self._tolerance:g}, but "
            f"{apart:.2%} of the tokens of iteration {now.state.iteration} differ by more; report it, or set "
            "`--check-rollout warn`"
        )
        if self._how == "error":
            return fail(NumericsError(text))
        self._monitor.message(f"warning: {text}")
        return CONTINUE
