"""Scores of a file's answers: log-probabilities under a language model, or rewards; on any layout."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megazero.checkpoint.disk import Disk
from megazero.checkpoint.saver import together
from megazero.config.tree.config import Config
from megazero.data.conversations.rows import BadRow, read_object, read_row
from megazero.data.preferences.pairs import read_pair
from megazero.data_tools.conversations import lines_of, read_each
from megazero.errors import DataError
from megazero.loss import LossTerm
from megazero.models.batch import Columns, MicroBatch, TextCollate
from megazero.models.classifier import SCORES
from megazero.models.objective import LOGS, AnswerBatch, LossChange, Objective
from megazero.mpu.context import ParallelContext
from megazero.mpu.group import Group
from megazero.post_training.files import encoder_of
from megazero.post_training.reward import RewardTask
from megazero.post_training.scores import PairCollate, RewardLoss
from megazero.post_training.task import Splits
from megazero.train.assemble import Run, assemble
from megazero.train.observe.evaluation import PeriodicEvaluation
from megazero.train.parts.vocabulary import Vocabulary, build_vocabulary
from megazero.train.resume.resume import Resumed
from megazero.train.step.engine import Engine
from megazero.train.step.feed import Feeds
from megazero.train.step.state import TrainState


@dataclass(frozen=True)
class ScoredLine:
    """A line of the file: the rows of one conversation, or of a pair.

    Attributes:
        rows: the token ids of each row, up to the last one that counts.
        counted: which of them are answers.
        names: the key of each row's score.
    """

    rows: tuple[np.ndarray, ...]
    counted: tuple[np.ndarray, ...]
    names: tuple[str, ...]


def read_lines(config: Config) -> list[ScoredLine]:
    """Read `--valid-data`, conversations or pairs of answers; every line is kept.

    Raises:
        DataError: a line is neither, has no answer, or its answer does not end within the sequence length.
    """
    (path,), encoder, length = config.finetune.valid_data, encoder_of(config), config.model.seq_length

    def read(line: bytes) -> ScoredLine:
        if "chosen" in read_object(line):
            chosen, rejected, _ = read_pair(line)
            texts = {"chosen": chosen, "rejected": rejected}
        else:
            texts = {"score": read_row(line)}
        rows, counted = [], []
        for ids, mask in map(encoder.encode, texts.values()):
            end = int(np.flatnonzero(mask)[-1]) + 1 if mask.any() else 0
            if not 1 < end <= length:
                raise BadRow(f"its answer must end within {length} tokens, but ends at {end}")
            rows.append(ids[:end])
            counted.append(mask[:end])
        return ScoredLine(tuple(rows), tuple(counted), tuple(texts))

    remedy = "correct the line, or raise --seq-length"
    lines = list(read_each(lines_of([path], goes_on=False), read, remedy))
    if not lines:
        raise DataError(f"`data` must hold a conversation or more, but {path} has none; check the file.")
    return lines


@dataclass(frozen=True)
class Likelihood(Objective):
    """The negative log-likelihood of answers."""

    terms = (LossTerm("lm"),)

    def __call__(self, logs: Tensor, batch: AnswerBatch, cp: Group) -> Mapping[str, Tensor]:
        """The sum over the answers' tokens."""
        return {"lm": -batch.learnt.weighted(logs).sum()}


class Scoring(RewardTask):
    """The task of scoring lines; each sample is two rows that need not belong together."""

    def __init__(self, lines: Sequence[ScoredLine], out: str, *, per_token: bool):
        super().__init__(Splits(None, None))
        self.lines = lines
        self.out = out
        self.per_token = per_token
        self._collate: PairCollate | TextCollate | None = None

    def implied(self, config: Config) -> Config:
        return super().implied(config) if config.finetune.task == "reward" else config

    def objective(self, config: Config) -> LossChange:
        return RewardLoss(config.reward) if config.model.num_classes else Likelihood()

    def begin(
        self, config: Config, context: ParallelContext, vocab_size: int, engine: Engine
    ) -> tuple[str, ...]:
        begin = super().begin if config.model.num_classes else super(RewardTask, self).begin
        return begin(config, context, vocab_size, engine)

    def feeds(self, resumed: Resumed, vocabulary: Vocabulary, context: ParallelContext) -> Feeds:
        config = resumed.config
        made: type[PairCollate | TextCollate] = PairCollate if config.model.num_classes else TextCollate
        self._collate = made.of(config, vocabulary.size, context, None)
        return Feeds(None, None, None)

    def evaluations(self, run: Run, disk: Disk | None) -> PeriodicEvaluation:
        return PeriodicEvaluation(lambda split, state: None, None, ())

    def conclude(self, run: Run, state: TrainState) -> None:
        """Score all lines, and write the file."""
        engine, config = run.resumed.engine, run.resumed.config
        flat = [pair for line in self.lines for pair in zip(line.rows, line.counted, strict=True)]
        step, values = 2 * config.batch.micro_batch_size * engine.context.data.size, []
        flat += [(np.zeros(1, np.int64), np.zeros(1, bool))] * (-len(flat) % step)
        for start in range(0, len(flat), step):
            values += self._scored(flat[start : start + step], engine, config)
        rows, records = iter(values), []
        for line in self.lines:
            record: dict[str, object] = {}
            for name, counted in zip(line.names, line.counted, strict=True):
                logs = next(rows)
                record[name] = float(logs.astype(np.float64).sum())
                if self.per_token:
                    record[f"{name}_tokens"] = [float(log) for log in logs[counted[1:]]]
            records.append(json.dumps(record) + "\n")
        out, disk, context = Path(self.out).absolute(), Disk(), engine.context

        def write() -> None:
            disk.make_parents(out.parent)
            disk.write_text(out, "".join(records))

        together(context, write if context.rank == 0 else None, f"write {out}")
        run.monitor.message(f"wrote the scores of {len(self.lines)} lines to {out}")

    def _scored(
        self, rows: Sequence[tuple[np.ndarray, np.ndarray]], engine: Engine, config: Config
    ) -> list[np.ndarray]:
        """The scores of a global batch's rows: of each counted token, at its place less 1, or one reward."""
        context, size, width = engine.context, config.batch.micro_batch_size, config.model.seq_length
        first = 2 * size * context.data.rank
        own = rows[first : first + 2 * size]
        tokens, counted = np.zeros((2 * size, width), np.int64), np.zeros((2 * size, width), np.float32)
        for i, (ids, mask) in enumerate(own):
            tokens[i, : len(ids)], counted[i, : len(ids)] = ids, mask
        rewards = config.model.num_classes is not None
        collate, samples = self._collate, tuple(range(2 * size))
        if isinstance(collate, PairCollate):
            lengths = np.array([len(ids) for ids, _ in own]).reshape(-1, 2)
            arrays = {"tokens": tokens.reshape(size, 2, width), "lengths": lengths, "answers": 0 * lengths}
            arrays["margins"] = np.zeros(size, np.float32)
            batch: MicroBatch = collate(arrays, samples[:size])
        else:
            assert collate is not None, "`feeds` sets it"
            labels, counts = np.roll(tokens, -1, 1), np.roll(counted, -1, 1)
            text = collate({"tokens": tokens, "labels": labels, "loss_mask": counts}, samples)
            batch = AnswerBatch(text.tokens, text.targets, places=text.places)
        (outputs,) = engine.evaluate([[batch]]).outputs
        values = torch.zeros(len(rows), 1 if rewards else width, device=context.device)
        columns = Columns.of(config.parallel, context)
        for output in outputs.values() if context.tp.rank == 0 else ():
            if rewards and columns.rank == 0:
                values[first : first + 2 * size, 0] = output[SCORES].view(-1)
            elif not rewards:
                places = torch.from_numpy(columns.own(np.arange(width)[None])[0]).to(context.device)
                values[first : first + 2 * size, places] = output[LOGS].t()
        context.world.all_reduce(values).wait()
        scores = values.cpu().numpy()
        if rewards:
            return [*scores]
        return [row[: len(ids) - 1] * mask[1:] for row, (ids, mask) in zip(scores, rows, strict=True)]


def score_on(
    config: Config,
    joined: ParallelContext,
    lines: Sequence[ScoredLine],
    out: str,
    *,
    per_token: bool = False,
) -> TrainState:
    """Score lines on a rank that has joined its job, such as a thread of a test.

    Args:
        lines: those of `--valid-data`, see `read_lines`.
        out: the file of JSON lines, in the order of the data: `score`, or `chosen` and `rejected`; it appears
            whole.
        per_token: whether to add each answer token's log-probability, under `score_tokens` and so on.

    Raises:
        MegazeroError: something that the user has to fix prevents the run.
    """
    task = Scoring(lines, out, per_token=per_token)
    config = task.completed(config, joined)
    return assemble(config, build_vocabulary(config), joined, task).carry_out(task)
