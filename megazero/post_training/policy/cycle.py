"""`Cycle`: a rollout and the updates on it, as the samples of a training's feed.

A sample is an answer. Answers have one endless order: rollout after rollout, and within one as many times as
it is trained on. So the samples that are consumed say which rollout is trained, and whether a new one begins.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megazero.config.steps import Step
from megazero.config.tree.config import Config
from megazero.data.blended import SampleDataset
from megazero.data.sampler import BatchSampler, SamplerSpec
from megazero.errors import CheckpointError, DataError
from megazero.models.batch import Columns, Places, SampleIndex, column_multiple, documents_on, tensor_of
from megazero.models.language_model import LanguageModel
from megazero.models.objective import AnswerBatch, ObjectiveChunk
from megazero.models.targets import Targets
from megazero.mpu.context import ParallelContext
from megazero.mpu.messages import first_value
from megazero.ops.attention import varying_shapes
from megazero.post_training.policy import objective as counts
from megazero.post_training.policy.methods import Method, advantages, deviations, equal_groups, weighted_sum
from megazero.post_training.policy.prompts import Prompts
from megazero.post_training.policy.reference import score
from megazero.post_training.policy.reward_model import RewardModel
from megazero.post_training.policy.rewards import Rewards
from megazero.post_training.policy.rollout import (
    ENTROPIES,
    FAILED,
    REFERENCE,
    REWARDS,
    ROUNDS,
    Copies,
    Drawing,
    Rollout,
    micro_batches,
)
from megazero.train.parts.vocabulary import Vocabulary
from megazero.train.step.engine import Engine
from megazero.train.step.feed import Feed
from megazero.zero.parallel import DataParallel

_BY_COLUMN = ("tokens", "labels", "weights", "answered", "logs", "reference")


@dataclass(frozen=True)
class Judges:
    """The judges of answers.

    Attributes:
        rewards: the reward functions.
        model: the reward model; None without one.
        reference: this rank's chunks of the reference; None without one.
    """

    rewards: Rewards
    model: RewardModel | None
    reference: dict[int, LanguageModel] | None


class Cycle(SampleDataset):
    """The answers of the current rollout, which is made when its first sample is due.

    Args:
        config: the run's configuration.
        engine: trains the model that answers.
        vocabulary: that of the model.
        prompts: what is answered.
        judges: what judges the answers.
    """

    name = "rollouts"
    notes = ()
    padding_share = 0.0

    def __init__(
        self, config: Config, engine: Engine, vocabulary: Vocabulary, prompts: Prompts, judges: Judges
    ):
        self.config, self.engine, self.vocabulary = config, engine, vocabulary
        self.prompts, self.judges = prompts, judges
        self.say: Callable[[str], None] = print
        self.note: Callable[[Mapping[str, object]], None] = lambda facts: None
        policy, batch = config.policy, config.batch.global_batch_size
        assert batch is not None, "a rule asks for it"
        assert vocabulary.tokenizer is not None, "`policy_on` asks for a tokenizer"
        self._prompts = policy.prompts_per_rollout or batch // policy.group_size
        self._answers = self._prompts * policy.group_size
        self._samples = self._answers * policy.rollout_iterations
        self._method = Method.of(policy)
        context = engine.context
        students = {
            number: chunk.student
            for number, chunk in engine.executor.chunks.items()
            if isinstance(chunk, ObjectiveChunk)
        }
        stops = frozenset(() if vocabulary.eod is None else (vocabulary.eod,))
        self._drawing = Drawing(config, students, context, Copies.of(context), stops)
        self._drawing.prepare(students)
        if judges.reference is not None:
            self._drawing.prepare(judges.reference)
        if judges.model is not None:
            self._drawing.prepare(judges.model.chunks)
        self.number = -1
        self._place: int | None = None
        self._rollout: Rollout | None = None
        self._rows: dict[str, np.ndarray] = {}

    @property
    def description(self) -> dict[str, object]:
        return {"kind": self.name, "prompts": self.prompts.digest, "answers": self._answers}

    def __len__(self) -> int:
        """More than any training consumes."""
        return 1 << 62

    @property
    def copies(self) -> int:
        """The copies of the model that answer."""
        return self._drawing.copies.count

    def begins(self, samples: int) -> bool:
        """Whether the update after so many samples is the first on its rollout."""
        return samples % self._samples == 0

    def reach(self, step: Step) -> None:
        """Make the rollout of a step, unless it is there; every rank calls this.

        Raises:
            CheckpointError: it has been made before, and is lost.
            DataError: no answer has a reward.
        """
        number, past = divmod(step.before.samples, self._samples)
        if number != self.number:
            if past:
                raise CheckpointError(
                    f"`rollout` must be in the checkpoint after {step.before.samples} samples, which is "
                    "within the updates on it, but is not; go on from a checkpoint between rollouts"
                )
            self._hold(number, self._made(number))
        # A checkpoint after this step needs the rollout unless the next step begins another.
        pending = (step.before.samples + step.batch_size) % self._samples != 0
        rollout = {}
        if pending and self._rollout is not None:
            rollout = {"rollout": str(number), "answers": self._rollout.packed()}
        self.note({"task": {**self.facts(), **rollout}})

    def facts(self) -> dict[str, str]:
        """Facts that a resumed run compares or goes on from: the place of the next prompt in their order."""
        place = {} if self._place is None else {"place": str(self._place)}
        return {"prompts": self.prompts.digest, **place}

    def resume(self, saved: Mapping[str, str]) -> None:
        """Take a checkpoint's rollout over.

        Raises:
            CheckpointError: the run's prompts are others.
        """
        if saved.get("prompts", self.prompts.digest) != self.prompts.digest:
            raise CheckpointError(
                "`prompts` must hold the prompts that the checkpoint was trained on, in their order, but "
                "hold others; use the same, or begin anew with `--finetune`"
            )
        if "place" in saved:
            self._place = int(saved["place"])
        if "answers" in saved:
            self._hold(int(saved["rollout"]), Rollout.unpacked(saved["answers"]))

    def batch(self, indices: Sequence[int] | np.ndarray) -> dict[str, np.ndarray]:
        """The arrays of answers, given their places in the order of the training."""
        rows = np.asarray(indices) % self._samples % self._answers
        return {name: array[rows] for name, array in self._rows.items()}

    def _made(self, number: int) -> Rollout:
        """Answer the prompts of a rollout, and judge the answers.

        Groups of equal rewards are exchanged for those of further prompts (Yu et al. 2025, dynamic sampling).
        """
        policy, sharding = self.config.policy, self.engine.executor.sharding
        assert isinstance(sharding, DataParallel), "an engine's weights are sharded so"
        first = number * self._prompts if self._place is None else self._place
        with sharding.gathered(), varying_shapes():
            rollout = self._judged(first, self._prompts)
            self._place = first + self._prompts
            for _ in range(policy.resample_rounds):
                rows = np.flatnonzero(self._equal(rollout))
                if not len(rows):
                    break
                count = len(rows) // policy.group_size
                rollout = rollout.replaced(rows, self._judged(self._place, count))
                self._place += count
        short = int(self._equal(rollout).sum()) // policy.group_size if policy.resample_rounds else 0
        if short:
            tried = f"after {policy.resample_rounds} further rounds of prompts"
            self.say(f"warning: {short} of {self._prompts} groups have equal rewards {tried}")
        if self.judges.reference is not None:
            reference = {REFERENCE: self._scored(rollout, self.judges.reference)}
            rollout = replace(rollout, noted={**rollout.noted, **reference})
        return rollout

    def _equal(self, rollout: Rollout) -> np.ndarray:
        """Whether an answer is of a group whose rewards are all equal, bool [B]."""
        policy = self.config.policy
        rewards = weighted_sum(rollout.noted[REWARDS], policy.reward_weights)
        return np.repeat(equal_groups(rewards.reshape(-1, policy.group_size)), policy.group_size)

    def _judged(self, first: int, count: int) -> Rollout:
        """Answers to so many prompts from the place `first` of their order, with rewards."""
        group = self.config.policy.group_size
        prompts = [self.prompts.at(first + place) for place in range(count)]
        rollout = self._drawing(prompts, first * group)
        rows = self._drawing.copies.share(count, group)
        answers, functions = count * group, len(self.judges.rewards.functions)
        own = np.zeros((answers, functions)), np.zeros(answers, np.int64)
        clause, mine = None, self._drawing.copies.leads
        if mine:
            ids = [rollout.answer(row) for row in rows]
            texts = [self._text(answer) for answer in ids]
            asked = [prompts[row // group] for row in rows]
            own[0][rows.start : rows.stop] = self.judges.rewards(asked, texts, ids)
            clause = "; ".join(self.judges.rewards.failures) or None
            own[1][rows.start : rows.stop] = clause is not None
        judged = self._drawing.everywhere({REWARDS: own[0], FAILED: own[1]}, mine=mine)
        if self.judges.model is not None:
            scores, mine = self.judges.model(rollout)
            column = self._drawing.everywhere({REWARDS: scores[:, None]}, mine=mine)
            judged[REWARDS] = np.concatenate((judged[REWARDS], column[REWARDS]), axis=1)
        self._report(judged[REWARDS], clause)
        return replace(rollout, noted={**rollout.noted, **judged})

    def _report(self, rewards: np.ndarray, clause: str | None) -> None:
        """Say which reward function failed, on the first copy where one did."""
        context = self.engine.context
        failure = first_value(context.world, clause, context.device)
        if failure is None:
            return
        if len(rewards) == self._answers and np.isnan(rewards).all():
            raise DataError(
                f"`reward_functions` must reward an answer, but none of {self._answers} has a reward: "
                f"{failure[1]}."
            )
        self.say(f"warning: rank {failure[0]}: {failure[1]}; its answers have no reward by it")

    def _text(self, answer: Sequence[int]) -> str:
        """An answer as text, without special tokens."""
        tokenizer = self.vocabulary.tokenizer
        assert tokenizer is not None, "`policy_on` asks for a tokenizer"
        special = {*tokenizer.special_ids.values(), *self._drawing.stops}
        return tokenizer.decode([token for token in answer if token not in special])

    def _scored(self, rollout: Rollout, reference: dict[int, LanguageModel]) -> np.ndarray:
        """The log-probabilities of all labels under the reference, float32 [B, W - 1], on every rank."""
        context, size = self.engine.context, self.config.batch.micro_batch_size
        self._hold(-1, rollout)
        parts, there = micro_batches(self._answers, size, context.data)
        collate = AnswerCollate.of(self.config, self.vocabulary, context)
        batches = [collate(self.batch(part), tuple(part.tolist())) for part in parts]
        logs = score(self.config, context, reference, counts.PolicyObjective.of(self.config), batches)
        whole = np.zeros_like(rollout.logs)
        for part, one in zip(parts, logs, strict=False):
            places = collate.columns.places(one.shape[1] * collate.columns.ranks)
            mine = np.flatnonzero(places[: whole.shape[1]] >= 0)
            whole[np.ix_(part, mine)] = one.cpu().numpy()[:, places[mine]]
        mine_alone = context.tp.rank == 0 and bool(logs) and there
        return self._drawing.everywhere({"logs": whole * rollout.answered()}, mine=mine_alone)["logs"]

    def _hold(self, number: int, rollout: Rollout) -> None:
        """Make a rollout the current one, with what its updates are given."""
        self.number, self._rollout = number, rollout
        policy, answered = self.config.policy, rollout.answered()
        rewards = weighted_sum(rollout.noted[REWARDS], policy.reward_weights)
        reference = rollout.noted.get(REFERENCE)
        if reference is not None and policy.kl_in == "reward":
            apart = ((rollout.logs - reference) * answered).sum(1, dtype=np.float64)
            rewards = rewards - (policy.kl_coef or 0.0) * apart
        groups = rewards.reshape(-1, policy.group_size)
        equal = self._equal(rollout)
        counted = ~equal if self._method.drop_equal_groups else np.ones_like(equal)
        if policy.mask_truncated:
            counted &= rollout.ended != 0
        there = ~np.isnan(rewards)
        spread = np.repeat(deviations(groups), policy.group_size)
        self._rows = {
            "tokens": rollout.tokens[:, :-1],
            "labels": rollout.tokens[:, 1:],
            "answered": answered.astype(np.float32),
            "weights": (answered & counted[:, None]).astype(np.float32),
            "logs": rollout.logs,
            "rows": rollout.lengths - 1,
            "prompts": rollout.prompts,
            "kept": rollout.kept,
            "advantages": advantages(groups, self._method.advantage).ravel().astype(np.float32),
            "reward": np.where(there, rewards, 0.0).astype(np.float32),
            "rewarded": there.astype(np.float32),
            "reward_std": spread.astype(np.float32),
            "answer_length": (rollout.lengths - rollout.prompts).astype(np.float32),
            "truncated": (rollout.ended == 0).astype(np.float32),
            "equal_groups": equal.astype(np.float32),
            "failed_rewards": rollout.noted[FAILED].astype(np.float32),
            "resampled": rollout.noted[ROUNDS].astype(np.float32),
            "entropy": rollout.noted[ENTROPIES].astype(np.float32),
            "counted": counted.astype(np.float32),
        }
        if reference is not None:
            self._rows["reference"] = reference


@dataclass(frozen=True)
class AnswerCollate:
    """Turns the arrays of `Cycle.batch` into an `AnswerBatch`, as narrow as its answers allow."""

    config: Config
    vocabulary: Vocabulary
    context: ParallelContext
    columns: Columns

    @classmethod
    def of(cls, config: Config, vocabulary: Vocabulary, context: ParallelContext) -> AnswerCollate:
        """Make the collate function of a run."""
        return cls(config, vocabulary, context, Columns.of(config.parallel, context))

    def width(self, arrays: Mapping[str, np.ndarray]) -> int:
        """The columns of a micro-batch: those of its longest row, as a multiple that every rank can share."""
        multiple = column_multiple(self.config)
        return -(-int(arrays["rows"].max()) // multiple) * multiple

    def __call__(self, arrays: Mapping[str, np.ndarray], samples: tuple[SampleIndex, ...]) -> AnswerBatch:
        """Make a batch; without dropout, as answers are drawn without it."""
        width, device = self.width(arrays), self.context.device

        def own(array: np.ndarray) -> np.ndarray:
            pads = ((0, 0), (0, max(0, width - array.shape[1])))
            return self.columns.own(np.pad(array, pads)[:, :width])

        columns = {name: own(arrays[name]) for name in _BY_COLUMN if name in arrays}
        given = {name: tensor_of(array, device) for name, array in arrays.items() if array.ndim == 1}
        given |= {name: tensor_of(array, device) for name, array in columns.items()}
        if arrays["kept"].shape[2]:
            given["kept"] = tensor_of(_by_column(arrays, width, self.columns), device)
        weights, documents = columns["weights"], None
        if self.config.model.num_experts and int(arrays["rows"].min()) < width:  # no expert sees padding
            documents = np.where(np.arange(width) < arrays["rows"][:, None], 0, -1).astype(np.int32)
        targets = Targets(given["labels"], given["weights"], float(weights.sum(dtype="float64")))
        counted, answered = arrays["counted"], arrays["answer_length"]
        divisors = {
            counts.ANSWERS: float(counted.sum()),
            counts.TOKENS: float((answered * counted).sum()),
            counts.ALL: float(len(counted)),
            counts.ALL_TOKENS: float(answered.sum()),
            counts.REWARDED: float(arrays["rewarded"].sum()),
            "tokens": float(arrays["rows"].sum()),  # which terms of routers are over: without padding
        }
        places = Places(documents=documents_on(device, documents))
        return AnswerBatch(given["tokens"], targets, places=places, given=given, divisors=divisors)


def _by_column(arrays: Mapping[str, np.ndarray], width: int, columns: Columns) -> np.ndarray:
    """The tokens that each label was drawn among, int64 [b, s, K], of this rank's columns."""
    kept = arrays["kept"]
    spread = np.full((len(kept), width, kept.shape[2]), -1)
    for row, (start, length) in enumerate(zip(arrays["prompts"], arrays["answer_length"], strict=True)):
        spread[row, start - 1 : start - 1 + int(length)] = kept[row, : int(length)]
    return columns.own(spread)


@dataclass(frozen=True)
class PolicyFeed(Feed[AnswerBatch]):
    """This rank's micro-batches of the answers of a `Cycle`; a step makes its rollout first if it is due."""

    @classmethod
    def of_cycle(cls, cycle: Cycle) -> PolicyFeed:
        """The feed of a cycle."""
        config, context = cycle.config, cycle.engine.context
        spec = SamplerSpec(
            num_samples=len(cycle),
            micro_batch_size=config.batch.micro_batch_size,
            data_parallel_rank=context.data.rank,
            data_parallel_size=context.data.size,
        )
        collate = AnswerCollate.of(config, cycle.vocabulary, context)
        return cls(cycle, BatchSampler(spec), collate)

    def of_step(self, step: Step) -> list[AnswerBatch]:
        """This rank's micro-batches of a step, of a new rollout if it begins one; every rank calls this."""
        assert isinstance(self.dataset, Cycle), "`of_cycle` sets it"
        self.dataset.reach(step)
        return self.micro_batches(step.before.samples, step.micro_batches)
