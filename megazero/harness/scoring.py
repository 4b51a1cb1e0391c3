"""Log-likelihoods of continuations under a model, on any layout.

The rules are those of lm-evaluation-harness: contexts are cut at the left, continuations never; log-softmax
over the real vocabulary in fp32; a text of any length is scored in windows, each of its tokens once. Here
sequences are packed without padding (see `packing`), only the rows that are needed get logits, and replicas
of a model share the packs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megazero.errors import ConfigError, DataError, NumericsError
from megazero.harness.packing import Ids, Pack, TreeCore, pack
from megazero.inference.staged import StagedModel
from megazero.layers.attention_cores import LocalCore
from megazero.models.batch import Batch, Places
from megazero.mpu.context import ParallelContext
from megazero.mpu.grid import stage_of_one_model
from megazero.mpu.messages import gather_values
from megazero.ops.attention import varying_shapes

TOKENS = 2048
"""Tokens of a row; matrix products hardly gain from more."""
_ROWS_AT_ONCE = 256  # rows whose logits, over the whole vocabulary, are in memory


class Score(NamedTuple):
    """The sum of log-probabilities of a continuation, and whether each token is the most likely one."""

    logprob: float
    greedy: bool


@dataclass(frozen=True)
class Share:
    """The part of the work that this rank's copy of the model does.

    Attributes:
        number: of this copy.
        copies: the number of copies.
        firsts: the first rank of each copy.
    """

    number: int
    copies: int
    firsts: tuple[int, ...]

    @classmethod
    def of(cls, context: ParallelContext) -> Share:
        """The share of a rank. Ranks of ``cp`` have whole copies; ranks that share experts work on one."""
        grid, width = context.grid, stage_of_one_model(context.grid)
        stage = grid.world_size // grid.pp
        return cls(context.rank % stage // width, stage // width, tuple(range(0, stage, width)))

    def gathered(self, own: Any, problem: str, context: ParallelContext) -> list[Any]:
        """The results of all copies, as JSON, on every rank; each rank calls this with its copy's.

        Raises NumericsError with the first copy's `problem` that is not empty.
        """
        rows = [(own, problem)]
        if context.world.size > 1:
            everyone = gather_values(context.world, rows[0], context.device)
            rows = [everyone[first] for first in self.firsts]
        if wrong := next((problem for _, problem in rows if problem), ""):
            raise NumericsError(wrong)
        return [result for result, _ in rows]


class Scorer:
    """Scores token sequences; every rank of the job calls each method with the same arguments.

    Args:
        model: the whole model, or this stage's parts.
        context: this rank's place in the job.
        max_length: the most tokens that the model reads at once; None for the model's positions.
        tokens: tokens of a row (see `pack`).

    Raises:
        ConfigError: a size does not fit the model.
    """

    def __init__(
        self,
        model: StagedModel[Batch],
        context: ParallelContext,
        *,
        max_length: int | None = None,
        tokens: int = TOKENS,
    ):
        spec = model.spec
        self.max_length = spec.positions if max_length is None else max_length
        bounded = spec.embedding.positions > 0 or any(a.sight.sparse for a in spec.attentions())
        if self.max_length < 1 or (bounded and self.max_length > spec.positions):
            raise ConfigError(
                f"`seq_length` must be from 1 to the {spec.positions} positions of the model, but is "
                f"{self.max_length}; leave it out"
            )
        # A state-space mixer has no keys to look back at, so each sequence has a row of its own.
        mixes = sum(1 for _ in spec.attentions()) < len(spec.layers)
        self.model, self.context, self.tokens = model, context, 1 if mixes else tokens
        self.share = Share.of(context)

    def score(self, pairs: Sequence[tuple[Ids, Ids]]) -> list[Score]:
        """Score each (context, continuation); the context has a token at least. The order is that of `pairs`.

        Raises:
            DataError: a context is empty, a continuation is longer than the model reads, or a token lies
                outside of the vocabulary.
            NumericsError: a log-probability is not a number.
        """
        inputs, targets = [], [list(continuation) for _, continuation in pairs]
        for number, (context, continuation) in enumerate(pairs):
            self._check(number, context, continuation)
            inputs.append([*context, *continuation][-(self.max_length + 1) :][:-1])
        work = [number for number, target in enumerate(targets) if target]
        packs = pack([inputs[number] for number in work], self.tokens)
        own: list[tuple[int, float, bool]] = []
        problem = ""
        try:
            with torch.inference_mode(), varying_shapes():
                for one in packs[self.share.number :: self.share.copies]:
                    own += self._scores(one, {place: targets[work[place]] for place in one.paths})
        except NumericsError as error:  # of one copy, while the others wait for its scores
            problem = str(error)
        scores = [Score(0.0, True)] * len(pairs)
        for rows in self.share.gathered(own, problem, self.context):
            for place, logprob, greedy in rows:
                scores[work[place]] = Score(logprob, greedy)
        return scores

    def _check(self, number: int, context: Ids, continuation: Ids) -> None:
        if not context:
            raise DataError(
                f"the context of request {number} must have a token, but is empty; begin it with eod"
            )
        if len(continuation) > self.max_length:
            raise DataError(
                f"the continuation of request {number} must have at most {self.max_length} tokens, which the "
                f"model reads at once, but has {len(continuation)}; score it in windows"
            )
        low, high = (extreme([*context, *continuation]) for extreme in (min, max))
        if low < 0 or high >= self.model.vocab_size:
            raise DataError(
                f"the tokens of request {number} must be in [0, {self.model.vocab_size}), but range from "
                f"{low} to {high}; was it made with another tokenizer?"
            )

    def _scores(self, one: Pack, targets: dict[int, list[int]]) -> Iterator[tuple[int, float, bool]]:
        """Yield (number, sum of log-probabilities, whether greedy) of each sequence of a pack."""
        device = self.model.device
        places = [
            (row, t)
            for n, ids in targets.items()
            for row, t in zip(one.last_rows(n, len(ids)), ids, strict=True)
        ]
        rows, index = torch.tensor([row for row, _ in places]).unique(return_inverse=True)
        wanted = torch.tensor([target for _, target in places])

        def logprobs(head: nn.Module, hidden: Tensor) -> Tensor:
            results = hidden.new_empty(len(places), 2, dtype=torch.float32)
            for start in range(0, len(rows), _ROWS_AT_ONCE):
                chunk = rows[start : start + _ROWS_AT_ONCE].to(device)
                here = ((index >= start) & (index < start + _ROWS_AT_ONCE)).nonzero().squeeze(1)
                logits = self.model.unsliced(head(hidden[chunk])).squeeze(1).float()
                own, ids = (index[here] - start).to(device), wanted[here].to(device)
                chosen, most = logits[own, ids], logits.amax(-1)
                greedy = chosen == most[own]
                # Of equally likely tokens the first counts.
                greedy[greedy.clone()] = logits[own[greedy]].argmax(-1) == ids[greedy]
                logits -= most.unsqueeze(1)
                results[here.to(device), 0] = chosen - most[own] - logits.exp_().sum(-1).log()[own]
                results[here.to(device), 1] = greedy.float()
            return results

        positions = torch.tensor([one.positions], device=device)
        batch = Batch(torch.tensor([one.tokens], device=device), places=Places(embedded=positions))
        core = TreeCore(one.segments, LocalCore(self.model.placement.tp))
        answers = self.model.run(batch, logprobs, (len(places), 2), lambda chunk: core).double().cpu()
        if not answers.isfinite().all():
            raise NumericsError(
                "log-probabilities must be finite, but are not; the model is damaged or too imprecise"
            )
        for number, part in zip(targets, answers.split([len(ids) for ids in targets.values()]), strict=True):
            yield number, float(part[:, 0].sum()), bool(part[:, 1].all())


def rolling(
    score: Callable[[list[tuple[Ids, Ids]]], list[Score]], texts: Sequence[Ids], prefix: int, length: int
) -> list[float]:
    """Sum what `score` says of the windows of each text."""
    windows = [list(rolling_windows(text, prefix, length)) for text in texts]
    scores = iter(score([pair for pairs in windows for pair in pairs]))
    return [sum(next(scores).logprob for _ in pairs) for pairs in windows]


def rolling_windows(tokens: Ids, prefix: int, length: int) -> Iterator[tuple[list[int], list[int]]]:
    """Yield (context, continuation) of windows that score each token once.

    The first window begins with `prefix`. Each later one sees `length` tokens, so that the last one has the
    whole context too and scores the rest alone.
    """
    if not tokens:
        return
    yield [prefix], list(tokens[:length])
    for start in range(length, len(tokens), length):
        stop = min(start + length, len(tokens))
        yield list(tokens[stop - length - 1 : start]), list(tokens[start:stop])
