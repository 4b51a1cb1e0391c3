"""A rollout: answers to prompts by the model that is being trained, whole on every rank.

Each copy of the model answers its share of the prompts; the arrays are then summed over all ranks, so that
every rank holds all answers and nothing that is computed of them depends on the layout.
"""

from __future__ import annotations

import base64
import io
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megazero.config.derive import PipelineShape
from megazero.config.tree.config import Config
from megazero.errors import DamagedCheckpointError
from megazero.inference.invariant import make_invariant
from megazero.inference.sampling import Sampling
from megazero.inference.staged import StagedModel
from megazero.models.chunk import StagedChunk
from megazero.models.language_model import LanguageModel
from megazero.mpu.context import ParallelContext
from megazero.mpu.group import Group
from megazero.post_training.policy.objective import invariant
from megazero.post_training.policy.prompts import Prompt
from megazero.serving.engine import Completed, complete
from megazero.serving.wanted import Wanted
from megazero.train.parts.chunks import schedule_of

ARRAYS = ("tokens", "prompts", "lengths", "ended", "logs", "kept")
NOTED = ("entropies", "rounds", "rewards", "failed", "reference")
ENTROPIES, ROUNDS, REWARDS, FAILED, REFERENCE = NOTED
_MODEL_GROUPS = ("tp", "ep", "pp")
"""The groups whose ranks compute answers together."""


@dataclass(frozen=True)
class Rollout:
    """B answers of at most W tokens with their prompts; position t of a row of labels is that of token t + 1.

    Attributes:
        tokens: int64 [B, W], prompt and answer, zeros behind.
        prompts: int64 [B], the number of tokens of the prompt.
        lengths: int64 [B], the number of tokens of both.
        ended: int64 [B], whether the answer ended by itself; else it was cut.
        logs: float32 [B, W - 1], the log-probability of each label when it was drawn; 0 elsewhere.
        kept: int64 [B, answer tokens, K], the tokens that each was drawn among, and -1 behind; K is 0 where
            those are all.
        noted: ``entropies``, float64 [B], the sum over an answer's tokens of the entropy of the distribution
            that each was drawn from, in nats; ``rounds``, int64 [B], how many prompts were answered in vain
            before that of the answer (see `replaced`); ``rewards``, float64 [B, judges], where NaN is none;
            ``failed``, int64 [B], whether a reward function failed; with a reference ``reference``, float32
            [B, W - 1], the log-probability of each label under it.
    """

    tokens: np.ndarray
    prompts: np.ndarray
    lengths: np.ndarray
    ended: np.ndarray
    logs: np.ndarray
    kept: np.ndarray
    noted: Mapping[str, np.ndarray]

    def packed(self) -> str:
        """The arrays as text, exactly, for a checkpoint's facts."""
        buffer = io.BytesIO()
        arrays: dict[str, Any] = {name: getattr(self, name) for name in ARRAYS}
        np.savez(buffer, **arrays, **dict[str, Any](self.noted))
        return base64.b64encode(zlib.compress(buffer.getvalue(), 6)).decode()

    @classmethod
    def unpacked(cls, text: str) -> Rollout:
        """The rollout of a checkpoint.

        Raises:
            DamagedCheckpointError: it is not one.
        """
        try:
            with np.load(io.BytesIO(zlib.decompress(base64.b64decode(text)))) as stored:
                arrays = dict(stored)
            noted = {name: arrays.pop(name) for name in NOTED if name in arrays}
            given: dict[str, Any] = {name: arrays[name] for name in ARRAYS}
            return cls(**given, noted=noted)
        except (ValueError, KeyError, zlib.error, OSError) as error:
            raise DamagedCheckpointError(
                f"`rollout` must be one of this version, but is not ({error})"
            ) from error

    def answer(self, row: int) -> list[int]:
        """The tokens of an answer."""
        answer: list[int] = self.tokens[row, self.prompts[row] : self.lengths[row]].tolist()
        return answer

    def replaced(self, rows: np.ndarray, others: Rollout) -> Rollout:
        """This rollout with `others` in these rows, answers to prompts that were drawn for theirs."""

        def joined(name: str, before: np.ndarray, now: np.ndarray) -> np.ndarray:
            shape = np.maximum(before.shape[1:], now.shape[1:])
            blank = -1 if name == "kept" else 0
            whole, those = (
                np.pad(x, [(0, 0), *((0, n - m) for n, m in zip(shape, x.shape[1:], strict=True))],
                       constant_values=blank)
                for x in (before, now)
            )  # fmt: skip
            whole[rows] = those
            return whole

        arrays: dict[str, Any] = {n: joined(n, getattr(self, n), getattr(others, n)) for n in ARRAYS}
        noted = {name: joined(name, array, others.noted[name]) for name, array in self.noted.items()}
        noted[ROUNDS][rows] = self.noted[ROUNDS][rows] + 1
        return Rollout(**arrays, noted=noted)

    def answered(self) -> np.ndarray:
        """Which labels are tokens of answers, bool [B, W - 1]."""
        places = np.arange(self.logs.shape[1])
        return np.asarray((places >= self.prompts[:, None] - 1) & (places < self.lengths[:, None] - 1))


@dataclass(frozen=True)
class Copies:
    """The copies of the model that answer, each on ranks of its own.

    Attributes:
        number: that of this rank's copy.
        count: how many there are.
        leads: whether this rank speaks for its copy.
    """

    number: int
    count: int
    leads: bool

    @classmethod
    def of(cls, context: ParallelContext) -> Copies:
        """Find the copies; every rank calls this."""
        leader = torch.tensor([context.rank], device=context.device)
        for name in (*_MODEL_GROUPS, *_MODEL_GROUPS):  # twice: a group may join two that others had not
            leading = -leader
            context.groups[name].all_reduce(leading, "max").wait()
            leader = -leading
        leaders = torch.zeros(context.world_size, dtype=torch.int64, device=context.device)
        leaders[leader] = 1
        context.world.all_reduce(leaders, "max").wait()
        return cls(int(leaders[: int(leader)].sum()), int(leaders.sum()), context.rank == int(leader))

    def share(self, prompts: int, group: int) -> range:
        """The answers of this copy: whole groups if there are as many prompts as copies."""
        unit = group if prompts >= self.count else 1
        units = prompts * group // unit
        return range(*(unit * (units * n // self.count) for n in (self.number, self.number + 1)))


@dataclass(frozen=True)
class Drawing:
    """Draws answers with the weights of a training.

    Attributes:
        config: the run's configuration.
        students: this rank's chunks, which train.
        context: this rank's place.
        copies: the copies of the model.
        stops: the tokens that end an answer.
    """

    config: Config
    students: Mapping[int, LanguageModel]
    context: ParallelContext
    copies: Copies
    stops: frozenset[int]

    def prepare(self, chunks: Mapping[int, StagedChunk[Any]]) -> StagedModel[Any]:
        """Chunks as a model that answers; its products are batch-invariant where the settings ask for it."""
        stage_of = schedule_of(PipelineShape.of(self.config)).stage_of
        model = StagedModel(chunks, stage_of, self.context.pp)
        if invariant(self.config):
            make_invariant(model)
        return model

    def __call__(self, prompts: Sequence[Prompt], first: int) -> Rollout:
        """Answer prompts, in groups; every rank calls this, with whole weights, and gets all answers.

        Args:
            prompts: the prompts.
            first: the number of the first answer in the run, by which tokens are drawn.
        """
        policy = self.config.policy
        # As they are written by their addresses, packed copies of the weights are made anew.
        self.prepare(self.students)
        model = self.prepare({n: chunk.without_sequence_parallelism() for n, chunk in self.students.items()})
        sampling = Sampling(
            policy.rollout_temperature,
            policy.rollout_top_k,
            policy.rollout_top_p,
            seed=self.config.training.seed,
            min_p=policy.rollout_min_p,
        )
        share = self.copies.share(len(prompts), policy.group_size)
        longest, group = policy.max_answer_tokens, policy.group_size
        asked = [
            Wanted(prompts[row // group].ids, longest, sampling, first + row, self.stops, as_drawn=True)
            for row in share
        ]
        answers = complete(model, asked) if asked else []
        count, width = len(prompts) * group, max(len(prompt.ids) for prompt in prompts) + longest
        arrays = _arrays(answers, asked, share, (count, width, longest))
        widest = torch.tensor([arrays["kept"].shape[2]], device=self.context.device)
        self.context.world.all_reduce(widest, "max").wait()
        more = int(widest) - arrays["kept"].shape[2]
        arrays["kept"] = np.pad(arrays["kept"], ((0, 0), (0, 0), (0, more)))
        whole = self.everywhere(arrays, mine=self.copies.leads)
        trimmed = int(whole["lengths"].max())
        whole["tokens"], whole["logs"] = whole["tokens"][:, :trimmed], whole["logs"][:, : trimmed - 1]
        whole["kept"] -= 1
        noted = {name: whole.pop(name) for name in (ENTROPIES, ROUNDS)}
        arguments: dict[str, Any] = whole
        return Rollout(**arguments, noted=noted)

    def everywhere(self, arrays: Mapping[str, np.ndarray], *, mine: bool) -> dict[str, np.ndarray]:
        """Sum arrays over all ranks, of which each element has but one that is not 0: those with `mine`."""
        summed = {}
        for name, array in arrays.items():
            tensor = torch.from_numpy(array if mine else np.zeros_like(array)).to(self.context.device)
            if tensor.numel():
                self.context.world.all_reduce(tensor, "sum").wait()
            summed[name] = tensor.cpu().numpy()
        return summed


def micro_batches(count: int, size: int, data: Group) -> tuple[np.ndarray, bool]:
    """A replica's share of `count` rows, int64 [micro-batches, size], and whether it has any.

    All replicas have as many micro-batches; its first rows stand again where rows are missing.
    """
    own, most = np.array_split(np.arange(count), data.size)[data.rank], -(-count // data.size)
    return np.resize(own, (-(-most // size), size)), len(own) > 0


def _arrays(
    answers: Sequence[Completed], asked: Sequence[Wanted], share: range, shape: tuple[int, int, int]
) -> dict[str, np.ndarray]:
    """The arrays of a copy's answers among all, zeros elsewhere; of `kept`, 1 is added to tokens.

    shape: the numbers of all answers, of the tokens of a row, and of those of an answer, at most.
    """
    count, width, longest = shape
    widest = max((len(token.best) for one in answers for token in one.tokens), default=0)
    of_answers = ("prompts", "lengths", "ended", ROUNDS)
    whole: dict[str, np.ndarray] = {name: np.zeros(count, np.int64) for name in of_answers}
    whole["tokens"], whole[ENTROPIES] = np.zeros((count, width), np.int64), np.zeros(count)
    whole["logs"] = np.zeros((count, width - 1), np.float32)
    whole["kept"] = np.zeros((count, longest, widest), np.int64)
    for row, wanted, answer in zip(share, asked, answers, strict=True):
        ids = [*wanted.prompt, *(token.id for token in answer.tokens)]
        start, end = len(wanted.prompt), len(ids)
        whole["tokens"][row, :end], whole["prompts"][row], whole["lengths"][row] = ids, start, end
        whole["ended"][row] = answer.reason == "stop"
        whole[ENTROPIES][row] = sum(token.entropy for token in answer.tokens)
        whole["logs"][row, start - 1 : end - 1] = [token.logprob for token in answer.tokens]
        for place, token in enumerate(answer.tokens):
            whole["kept"][row, place, : len(token.best)] = [one + 1 for one, _ in token.best]
    return whole
